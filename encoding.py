"""From a chat or a text to token ids and labels: which characters are supervised, and which tokens those are.

A chat is rendered twice, as it is and with a mark of one unused character before and after each message's content. Where
the second equals the first without its marks, the marks say where the template put each message, whatever else it does:
trim, reorder, fold a system prompt, drop the thinking of earlier turns. So no template has to say itself what is generated.

An answer is what follows the template's header up to and including the token that ends the turn, tool calls included. Text
from the data never becomes a control token: where it looks like one, the row is encoded with the two kept apart.
"""

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

import chat
import formats

IGNORE_INDEX = -100
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"}

# Two private planes of Unicode, which no text uses: one for the marks, one for what stands for a control token.
_MARKS, _STAND_INS = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_STAND_IN = re.compile("[\U00100000-\U0010fffd]")
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")
_WRITTEN_OUT = re.compile(r"\\U0010[0-9a-f]{4}|\\udb[c-f][0-9a-f]\\ud[c-f]", re.IGNORECASE)  # stand-ins, as repr and JSON do


# Keys of a message that Transformers passes on as they are; reasoning is copied to keys of several names.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_PLAIN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "weight"}


class ChoiceNeeded(ValueError):
    """Text rows hold control tokens, and whether those are meant is not said; not the fault of a single row."""


@dataclass
class Encoded:
    """A row as tokens: `input_ids` and `labels` (int32 arrays of equal length, -100 where the loss does not look)."""

    input_ids: np.ndarray
    labels: np.ndarray
    length: int  # tokens before truncation
    digest: int  # of the tokens before truncation
    truncated: bool = False
    too_long: bool = False  # and so to be dropped
    system_folded: bool = False
    escaped: bool = False  # text of the data that looks like a control token was kept as text
    empty_turn: bool = False
    not_alternating: bool = False


@dataclass
class _Rendered:
    """A text with the character spans to supervise; None supervises all of it.

    `bounds` are the places where an answer begins: no token may reach over them, since generation starts there.
    """

    text: str
    spans: list[tuple[int, int]] | None = None
    bounds: tuple[int, ...] = ()
    stand_ins: bool = False  # control tokens in the data are replaced by what stands for them


class Encoder:
    """Encodes rows for one tokenizer and one set of options.

    Args:
        tokenizer: as `chat.prepare_tokenizer` leaves it.
        loss_on: "assistant" (each of the assistant's turns), "completion" (what follows the prompt; of a chat the last
            turn) or "all". None: the assistant's turns of chats, completions of prompts, all of plain text.
        add_special_tokens: whether the tokenizer adds its own BOS/EOS; None means only where no chat template wrote them.
        append_concat_token: end the row with EOS unless it ends with it already (white space apart).
        max_length: tokens of a row; None for no limit.
        truncation: what to do with longer rows: cut at the "right" or "left", "drop" them or raise an "error".
        control_tokens: whether control tokens written in text rows are such ("keep") or text ("escape"); None raises
            `ChoiceNeeded` where it matters. In chats they are always text.

    Raises:
        ValueError: a template that cannot be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        loss_on: str | None = None,
        add_special_tokens: bool | None = None,
        append_concat_token: bool = True,
        max_length: int | None = None,
        truncation: str = "right",
        control_tokens: str | None = None,
    ):
        self.tokenizer, self.loss_on, self.control_tokens = tokenizer, loss_on, control_tokens
        self.add_special_tokens, self.append_concat_token = add_special_tokens, append_concat_token
        self.max_length, self.truncation = max_length, truncation
        self.template = chat.inspect(tokenizer) if tokenizer.chat_template is not None else None
        self.backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder
        special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # Some published tokenizers do not call the tokens special that begin their turns (DeepSeek's, Command R's).
        special |= {id for id, token in added.items() if self.template and token.content in self.template.markers}
        self.special = {id: added[id] if id in added else AddedToken(tokenizer.convert_ids_to_tokens(id)) for id in special}
        words = sorted((token.content for token in self.special.values()), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self.number = {token.content: number for number, token in enumerate(self.special.values())}
        self._apart, self._blank = None, {}
        self._fixed = {"documents": None, "add_generation_prompt": False, **tokenizer.special_tokens_map}
        self.control_ids = list(self.special.keys() - {tokenizer.unk_token_id})  # which stands for text it cannot write
        self.inner = {word.strip("<|>[]/") for word in self.number} - ROLES
        # A normaliser may make a control token of text that is none (a full-width one under NFKC).
        self.normalizes = any(token.normalized for token in self.special.values())

    # ---- One row, or many ----

    def encode(self, rows: list[formats.Row]) -> list["Encoded | ValueError"]:
        """Tokens of each row, or what is wrong with it."""
        results: list = [None] * len(rows)
        rendered = []
        for index, row in enumerate(rows):
            try:
                rendered.append((index, *self._render(row)))
            except ChoiceNeeded:
                raise
            except ValueError as error:
                results[index] = error
        self.backend.no_truncation()  # a published tokenizer.json may have either switched on
        self.backend.no_padding()
        for add in (False, True):  # whether the tokenizer adds its BOS and EOS
            plain = [(i, text, facts) for i, text, facts in rendered if not text.stand_ins and facts["add"] is add]
            encodings = self.backend.encode_batch([text.text for _, text, _ in plain], add_special_tokens=add)
            for (index, text, facts), encoding in zip(plain, encodings, strict=True):
                supervised = self._supervised(encoding, text)
                if supervised is None or (self.normalizes and not self._has_its_own(encoding, text.text)):
                    results[index] = self._try_apart(text, facts)
                else:
                    results[index] = self._finish(np.array(encoding.ids, dtype=np.int32), supervised, text, facts)
        for index, text, facts in rendered:
            if text.stand_ins:
                results[index] = self._try_apart(text, facts)
        return results

    def one(self, row: formats.Row) -> Encoded:
        """Tokens of a row.

        Raises:
            ValueError: what is wrong with it.
        """
        result = self.encode([row])[0]
        if isinstance(result, ValueError):
            raise result
        return result

    def pieces(self, ids, labels) -> list[tuple[str, bool]]:
        """The text of a row in pieces, each with whether it is supervised, as the data report shows it."""
        supervised = np.asarray(labels) != IGNORE_INDEX
        edges = [0, *(np.flatnonzero(np.diff(supervised)) + 1), len(supervised)]
        found = []
        for a, b in itertools.pairwise(edges):
            if b > a:
                # With a few tokens before it: many tokenizers drop a space where decoding begins.
                context = list(ids[max(a - 8, 0) : a])
                text = self.tokenizer.decode(context + list(ids[a:b]))[len(self.tokenizer.decode(context)) :]
                found.append((text, bool(supervised[a])))
        return found

    # ---- Rendering ----

    def _render(self, row: formats.Row) -> tuple[_Rendered, dict]:
        facts = {"add": self.add_special_tokens, "escaped": False, "folded": False, "empty": False, "not_alternating": False}
        if row.messages is None:
            facts["add"] = True if facts["add"] is None else facts["add"]
            return self._render_text(row, facts), facts
        facts["add"] = bool(facts["add"])
        if self.template is None:
            raise ValueError("the row is a chat but there is no chat template: set --chat_template_format")
        facts["empty"], facts["not_alternating"] = formats.oddities(row.messages)
        messages, tools, prompt = row.messages, row.tools, row.prompt
        if messages[0]["role"] in ("system", "developer") and not self.template.takes_system:
            messages, facts["folded"] = self._fold_system(messages), True
            prompt = prompt - 1 if prompt else prompt
        strings = "\n".join(_strings((messages, tools)))
        if _PRIVATE.search(strings):
            raise ValueError("it holds characters of Unicode's private planes 15 and 16, which are needed here as marks")
        if self.control.search(strings):
            facts["escaped"] = True
            messages, tools = (_replace(value, self.control, self._stand_in) for value in (messages, tools))
        if tools and not self.template.takes_tools:
            raise ValueError("it has tools, which the chat template leaves out: use a template that writes them")
        if self.template.calls_as_text:
            messages = [_with_arguments_as_text(m) if "tool_calls" in m else m for m in messages]
        return self._render_chat(messages, tools, prompt, facts), facts

    def _stand_in(self, found: re.Match) -> str:
        return chr(_STAND_INS[self.number[found.group()]])

    def _fold_system(self, messages: list[dict]) -> list[dict]:
        system, first = messages[0], next((m for m in messages[1:] if m["role"] == "user"), None)
        if first is None:
            raise ValueError("the chat template has no place for a system message, and there is no user's turn to put it in")
        folded = first | {"content": f"{system['content']}\n\n{first['content']}".lstrip("\n")}
        return [folded if message is first else message for message in messages[1:]]

    def _render_text(self, row: formats.Row, facts: dict) -> _Rendered:
        text, found = row.text, self.control.search(row.text)
        completion = row.prompt is not None and self.loss_on != "all"
        if completion and not text[row.prompt :]:
            raise ValueError("the completion is empty")
        spans = [(row.prompt, len(text))] if completion else None
        if found and self.control_tokens is None and self._is_inside(text):
            raise ChoiceNeeded(
                f"text rows hold control tokens, such as {found.group()!r}: say whether they are meant, because the text "
                "was rendered with a template (--control_tokens_in_text keep), or are text (--control_tokens_in_text escape)"
            )
        if found and self.control_tokens == "escape":
            facts["escaped"] = True
            pieces, bounds, border = [], [], row.prompt
            if _PRIVATE.search(text):
                raise ValueError("it holds characters of Unicode's private planes 15 and 16, which are needed here as marks")
            for match in self.control.finditer(text) if completion else ():  # one across the border is the completion's
                border = match.start() if match.start() < row.prompt < match.end() else border
            for piece in (text[:border], text[border:]) if completion else (text,):
                pieces.append(self.control.sub(self._stand_in, piece))
                bounds.append(sum(map(len, pieces)))
            return _Rendered("".join(pieces), [tuple(bounds)] if completion else None, stand_ins=True)
        return _Rendered(text, spans)

    def _is_inside(self, text: str) -> bool:
        """Whether a control token is anywhere but at the ends, where BOS and EOS mean what they say."""
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token
        return bool(self.control.search(text.strip().removeprefix(bos or "").removesuffix(eos or "")))

    def _apply_template(self, messages: list[dict], tools: list | None) -> str:
        try:
            if all(message.keys() <= _PLAIN_KEYS for message in messages):
                # As apply_chat_template renders plain messages, without its copies of them, which take as long.
                compiled = _compile_jinja_template(self.tokenizer.chat_template)
                return compiled.render(messages=messages, tools=tools, **self._fixed)
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception as error:  # Jinja errors, and whatever a template raises on purpose
            raise ValueError(f"the chat template refuses it ({error})") from None

    def _render_chat(self, messages: list[dict], tools: list | None, prompt: int | None, facts: dict) -> _Rendered:
        text = self._apply_template(messages, tools)
        whole = _Rendered(text, None, stand_ins=facts["escaped"])
        if role := next((m["role"] for m in messages if m["role"] in self.inner), None):
            raise ValueError(f"its role {role!r} is the name of a control token, which a template may make of it")
        if facts["escaped"] and _WRITTEN_OUT.search(text):
            raise ValueError("it holds control tokens where the chat template writes text as code (repr), not as it is")
        if 2 * len(messages) > len(_MARKS):
            raise ValueError(f"it has {len(messages)} messages; at most {len(_MARKS) // 2} can be told apart")
        for only_answers in (False, True):  # a template may look at how a user's turn begins (Qwen's tool responses)
            marked = [
                m if only_answers and m["role"] != "assistant" else _mark(m, chr(_MARKS[2 * i]), chr(_MARKS[2 * i + 1]))
                for i, m in enumerate(messages)
            ]
            with_marks = self._apply_template(marked, tools)
            if _MARK.sub("", with_marks) == text:
                break
        else:
            if self.loss_on == "all" and all(message.get("weight", 1) for message in messages):
                return whole
            raise ValueError("the chat template changes with what a message holds, so its answers cannot be found in it")
        places: dict[int, list[int]] = {}  # of the marks of each message, in the text without them
        begun = set()  # messages whose beginning is in the text
        for count, found in enumerate(_MARK.finditer(with_marks)):
            index, is_end = divmod(ord(found.group()) - _MARKS.start, 2)
            places.setdefault(index, []).append(found.start() - count)
            begun |= set() if is_end else {index}
        for index, message in enumerate(messages):
            written = message["content"].strip() or message.get("tool_calls")
            if written and index not in places and not (only_answers and message["role"] != "assistant"):
                raise ValueError(f"the chat template leaves out message {index} (role {message['role']!r})")
            begin, end = chr(_MARKS[2 * index]), chr(_MARKS[2 * index + 1])
            names = [f"{begin}{call['function']['name'].strip()}{end}" for call in message.get("tool_calls", ())]
            if any(with_marks.count(name) < names.count(name) for name in names):
                raise ValueError(f"the chat template leaves out the tool calls of message {index}: use one that writes them")
        thought = next((messages[-1][key] for key in _REASONING_KEYS if messages[-1].get(key)), None)
        if isinstance(thought, str) and thought.strip() not in text:  # of earlier turns it is left out on purpose
            raise ValueError(
                f"the chat template leaves out the reasoning of message {len(messages) - 1}: use one that writes it"
            )
        if self.loss_on == "all":
            if all(message.get("weight", 1) for message in messages):
                return whole
            left_out = [message | {"weight": not message.get("weight", 1)} for message in messages]
            left_out = self._answers(left_out, text, places, begun, None)
            edges = [0, *(edge for span in left_out for edge in span), len(text)]
            spans = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
            return _Rendered(text, spans, tuple(low for low, _ in left_out if low), stand_ins=facts["escaped"])
        spans = self._answers(messages, text, places, begun, prompt)
        bounds = tuple(start for start, _ in spans if self.template.header and text.endswith(self.template.header, 0, start))
        return _Rendered(text, spans, bounds, stand_ins=facts["escaped"])

    def _answers(self, messages, text, places, begun, prompt) -> list[tuple[int, int]]:
        """The spans of the answers to supervise, each from its header to the token that ends it."""
        header, turn_end = self.template.header, self.template.turn_end
        edges = sorted(place for found in places.values() for place in found)
        last = len(messages) - 1
        only_completion = self.loss_on == "completion" or (self.loss_on is None and prompt is not None)
        first = 0 if not only_completion else last if prompt is None else prompt
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < first or message.get("weight", 1) == 0 or index not in places:
                continue
            low, high = min(places[index]), max(places[index])
            inside = sum(low < place < high for found in places.values() for place in found)
            if inside != sum(low < place < high for place in places[index]):
                raise ValueError(f"the chat template writes message {index} in several places")
            before = bisect.bisect_left(edges, low)
            after = bisect.bisect_right(edges, high)
            lower = edges[before - 1] if before else 0
            upper = edges[after] if after < len(edges) else len(text)
            # Where the template dropped the beginning (thinking of earlier turns), a header may also be in what is left.
            find = text.rfind if index in begun else text.find
            at = find(header, lower, low) if header else -1
            # White space at the ends of an answer lies outside its marks, and belongs to it if the template keeps it.
            content = message["content"]
            lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
            kept = len(lead) if index in begun and text.endswith(lead, lower, low) else 0
            start = at + len(header) if at >= 0 else low - kept
            end = text.find(turn_end, high, upper) if turn_end is not None else -1
            if end >= 0:
                end += len(turn_end)
            elif "tool_calls" in message:
                raise ValueError(f"where message {index} ends, after its tool calls, cannot be told from this chat template")
            else:
                end = high + (len(trail) if text.startswith(trail, high) else 0)
            spans.append((start, end))
        return sorted(spans)

    # ---- Tokens ----

    def _try_apart(self, text: _Rendered, facts: dict):
        try:
            return self._encode_apart(text, facts)
        except ValueError as error:
            return error

    def _encode_apart(self, rendered: _Rendered, facts: dict, breaks: bool = False) -> Encoded | ValueError:
        """Encode with the template's control tokens and the data's look-alikes kept apart, and a break at each bound.

        The control tokens become one character each, which a copy of the tokenizer knows as tokens; that copy reads all
        others as text.
        """
        if self._apart is None:
            self._apart = self._tokenizer_apart()
        backend, real_ids, break_id = self._apart
        edits = [(m.start(), m.end(), chr(_MARKS[self.number[m.group()]])) for m in self.control.finditer(rendered.text)]
        words = {chr(_STAND_INS[number]): word for word, number in self.number.items()}
        if rendered.stand_ins:
            edits += [(m.start(), m.end(), words[m.group()]) for m in _STAND_IN.finditer(rendered.text)]
        edits += [(bound, bound, chr(_MARKS[-1])) for bound in rendered.bounds if breaks]
        edits.sort()
        text, places, at = [], [(0, 0)], 0  # (old place, new place) after each edit
        size = 0
        for start, end, new in edits:
            text += [rendered.text[at:start], new]
            size += start - at + len(new)
            at = end
            places.append((end, size))
        text = "".join([*text, rendered.text[at:]])
        olds = [old for old, _ in places]

        def moved(place):  # a place right after an edit is after it
            old, new = places[bisect.bisect_right(olds, place) - 1]
            return new + place - old

        spans = rendered.spans and [(moved(low), moved(high)) for low, high in rendered.spans]
        encoding = backend.encode(text, add_special_tokens=facts["add"])
        ids, offsets = _ids_and_offsets(encoding)
        # A break makes some tokenizers put a space after it, so there is none unless a token reaches over a bound.
        bounds = () if breaks else map(moved, rendered.bounds)
        if any(((offsets[:, 0] < bound) & (offsets[:, 1] > bound)).any() for bound in bounds):
            return self._encode_apart(rendered, facts, breaks=True)
        aliased = np.isin(ids, list(real_ids))
        begins_or_ends = offsets[:, 0] == offsets[:, 1]  # what the tokenizer adds itself
        if (np.isin(ids, self.control_ids) & ~aliased & ~begins_or_ends).any():
            raise ValueError("it holds text that looks like a control token, and this tokenizer cannot write that as text")
        keep = ids != break_id
        ids = np.array([real_ids.get(id, id) for id in ids.tolist()], dtype=np.int32)
        return self._finish(ids[keep], _overlapping(offsets, spans)[keep], _Rendered(text, spans), facts)

    def _tokenizer_apart(self) -> tuple[Tokenizer, dict[int, int], int]:
        state = json.loads(self.backend.to_str())
        for token in state["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self.special  # those that are, can be read as text
        backend = Tokenizer.from_str(json.dumps(state))
        tokens = {
            id: AddedToken(
                chr(_MARKS[self.number[token.content]]), lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
            )
            for id, token in self.special.items()
        }
        backend.add_tokens([*tokens.values(), AddedToken(chr(_MARKS[-1]), normalized=False)])
        backend.encode_special_tokens = True
        real_ids = {backend.token_to_id(token.content): id for id, token in tokens.items()}
        return backend, real_ids, backend.token_to_id(chr(_MARKS[-1]))

    def _supervised(self, encoding: Encoding, rendered: _Rendered) -> np.ndarray | None:
        """Which tokens are supervised (n,); None if one reaches over the beginning of an answer."""
        text, spans = rendered.text, rendered.spans
        if not spans:
            return np.full(len(encoding), spans is None)
        if not all(self._is_plain(text, low, high) for low, high in spans):
            offsets = _ids_and_offsets(encoding)[1]
            if any(((offsets[:, 0] < bound) & (offsets[:, 1] > bound)).any() for bound in rendered.bounds):
                return None
            return _overlapping(offsets, spans)
        supervised = np.zeros(len(encoding), dtype=bool)
        for low, high in spans:
            first, last = encoding.char_to_token(low), encoding.char_to_token(high - 1)
            if low in rendered.bounds and encoding.token_to_chars(first)[0] < low:
                return None
            supervised[first : last + 1] = True
        return supervised

    def _has_its_own(self, encoding: Encoding, text: str) -> bool:
        """Whether a row has as many control tokens as its text has, beside those the tokenizer adds itself."""
        made = int(np.isin(encoding.ids, self.control_ids).sum())
        return made == len(self.control.findall(text)) + sum(encoding.special_tokens_mask)

    def _is_plain(self, text: str, low: int, high: int) -> bool:
        """Whether the tokens at the ends of an answer can be asked for by character, which is faster than by all offsets.

        Not next to white space, which tokenizers leave out of offsets, nor where the last character may be several tokens.
        """
        turn_end = self.template and self.template.turn_end
        ended = bool(turn_end) and text.endswith(turn_end, low, high)
        return ended and not text[low].isspace() and text[low - 1 : low] != " "

    def _finish(self, ids: np.ndarray, supervised: np.ndarray, rendered: _Rendered, facts: dict) -> Encoded | ValueError:
        bos, eos, spans = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, rendered.spans
        # The text has a BOS, and the tokenizer added one.
        if bos is not None and bos != eos and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids, supervised = ids[1:], supervised[1:]
        if self.append_concat_token and not self._ends_with_eos(ids):
            ends_supervised = spans is None or bool(spans and spans[-1][1] >= len(rendered.text.rstrip()))
            ids, supervised = np.append(ids, np.int32(eos)), np.append(supervised, ends_supervised)
        if not len(ids):
            return ValueError("the row is empty")
        labels = np.where(supervised, ids, IGNORE_INDEX).astype(np.int32)
        length, digest, limit = len(ids), xxhash.xxh3_64_intdigest(ids.tobytes()), self.max_length
        long = limit is not None and length > limit
        if long and self.truncation == "error":
            return ValueError(f"it has {length} tokens, more than --max_length {limit} (--truncation error)")
        if long and self.truncation == "left":
            keep = np.arange(length - limit, length)
            keep[0] = 0 if ids[0] == bos else keep[0]  # a model that was trained with BOS needs it
            ids, labels = ids[keep], labels[keep]
        elif long:
            ids, labels = ids[:limit], labels[:limit]
        return Encoded(
            ids,
            labels,
            length,
            digest,
            truncated=long and self.truncation != "drop",
            too_long=long and self.truncation == "drop",
            system_folded=facts["folded"],
            escaped=facts["escaped"],
            empty_turn=facts["empty"],
            not_alternating=facts["not_alternating"],
        )

    def _ends_with_eos(self, ids: np.ndarray) -> bool:
        # A template may write white space or another token after the one that ends a turn.
        for token in ids[-4:][::-1].tolist():
            if token == self.tokenizer.eos_token_id:
                return True
            if token not in self._blank:
                self._blank[token] = not self.tokenizer.decode([token], skip_special_tokens=True).strip()
            if not self._blank[token]:
                return False
        return False


def _ids_and_offsets(encoding) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (n,) and the characters [from, to) that each stands for (n, 2).

    Tokenizers leave leading spaces out of a token's offsets, so that a token of spaces has none. Here it has them all.
    """
    ids, offsets = np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    reached = np.maximum.accumulate(offsets[:, 1])
    offsets[1:, 0] = np.minimum(offsets[1:, 0], reached[:-1])
    offsets[:1, 0] = 0
    return ids, offsets


def _overlapping(offsets: np.ndarray, spans: list[tuple[int, int]] | None) -> np.ndarray:
    """Tokens with a character in a span. One that straddles its start ("▁Paris" after a space) belongs to the answer."""
    supervised = np.full(len(offsets), spans is None)
    for low, high in spans or ():
        supervised |= (offsets[:, 0] < high) & (offsets[:, 1] > low)
    return supervised


def _strings(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(item)


def _replace(value, pattern: re.Pattern, replacement):
    if isinstance(value, str):
        return pattern.sub(replacement, value)
    if isinstance(value, dict):
        return {_replace(key, pattern, replacement): _replace(item, pattern, replacement) for key, item in value.items()}
    return [_replace(item, pattern, replacement) for item in value] if isinstance(value, list) else value


def _with_arguments_as_text(message: dict) -> dict:
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    calls = zip(message["tool_calls"], functions, texts, strict=True)
    return message | {"tool_calls": [call | {"function": made | {"arguments": text}} for call, made, text in calls]}


def _mark(message: dict, before: str, after: str) -> dict:
    """A message with marks around its text and its tool calls' names, inside the white space that a template may trim."""

    def around(text):
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        return f"{text[:at]}{before}{core}{after}{text[at + len(core) :]}"

    marked = message | {"content": around(message["content"])}
    if "tool_calls" in message:
        marked["tool_calls"] = [
            call | {"function": call["function"] | {"name": around(call["function"]["name"])}}
            for call in message["tool_calls"]
        ]
    return marked
