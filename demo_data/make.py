"""Writes train.jsonl and test.jsonl: customer-support messages and the JSON a ticket system wants from them.

    python demo_data/make.py            # rewrites both files, byte for byte the same every time

Nothing is shared between the two splits except the task: products, order numbers, customer names, message bodies,
openings, closings and side remarks each come from a list of their own. A model that only memorised the
training messages scores zero on the test split. `check` asserts all of this before anything is written.
"""

import argparse
import json
import random
import re
from pathlib import Path

SEED = 20
SYSTEM = "Turn the message into JSON: intent (refund, cancel, tracking, invoice), order_id, product"
INTENTS = ("refund", "cancel", "tracking", "invoice")
KEY_WORDS = re.compile(r"refund|return|money|paid|cancel|order|invoice|receipt|bill|deliver|arriv|shipp|track|expect", re.I)

TRAIN = {
    "rows_per_body": 2,
    "refund": [
        "I sent back the {p} from order {o} two weeks ago and still no money on my card.",
        "The {p} is nothing like the photo. I want my money back for {o}.",
        "please refund {o}, the {p} was broken when I opened the box",
        "Can I get a refund on my {p}? Order number {o}.",
        "You charged me twice for the {p} on {o}. Return the second payment please.",
        "My {p} stopped working after a day. Order {o}, I'd like to be reimbursed.",
        "Order {o}: returned the {p}, tracking says you have it. When do I get paid back?",
        "I'm not happy with the {p} and want a full refund. It's {o}.",
        "how do i get my money back for a {p}?? order {o}",
        "{o} - the {p} smells awful, I returned it, give me back what I paid",
        "Half the parts of the {p} were missing so I'm asking for a refund on order {o}.",
        "The {p} in {o} went on sale a day later. Could you refund me the difference?",
        "I no longer want the {p} I received. Refund to my card please, ref {o}.",
        "Your shop said 5 days for a refund. Its been 12. {p}, order {o}.",
        "Bought a {p} as a gift, he already had one. May I return it for my money? {o}",
        "Where is the refund for {o}? I posted the {p} on the 3rd.",
        "I'd like a refund for the {p}, order {o}.",
        "My {p} broke in the first week, give me a refund. {o}",
        "Please pay me back for {o}, the {p} is faulty.",
        "I returned the {p} and the money has not reached my account. {o}",
        "Can you refund the {p}? It was never used. Order {o}.",
        "You still owe me money for the {p} I sent back, {o}.",
        "{o}: full refund please, the {p} is a fake",
        "The {p} cost me twice the price you show. Refund the rest, {o}.",
        "The {p} is the wrong colour, I want my money back. {o}",
        "Is order {o} refunded yet? I gave the {p} back to your driver.",
        "I'd rather have my money back than another {p}. Order {o}.",
        "The seam of the {p} opened. Please refund me, {o}.",
        "Refund {o}. The {p} came broken and late.",
        "My bank shows no refund for the {p}. Order {o}.",
    ],
    "cancel": [
        "Please cancel order {o}, I ordered the {p} by mistake.",
        "I changed my mind about the {p}. Can you cancel {o} before it ships?",
        "need to cancel {o} ({p}), found it cheaper",
        "Can I still call off the {p}? The order is {o}.",
        "Stop order {o}. I clicked twice and don't need a second {p}.",
        "Don't send the {p} please, my husband bought one already. Order no {o}.",
        "Kindly cancel my {p}, reference {o}.",
        "My daughter ordered a {p} on my account without asking. Cancel {o} please.",
        "It says the {p} ships in six weeks, thats too long. Cancel {o}.",
        "I'd like to withdraw my order {o} for the {p}.",
        "pls cancel the {p} i just bought. {o}",
        "We don't need the {p} any more, so drop order {o} if it has not left yet.",
        "Is it too late to cancel? {o}, one {p}.",
        "Order {o} has the wrong address so just cancel the {p} and I'll order again.",
        "Cancelling {o} on your site gives an error. Please do it for me, it's the {p}.",
        "Take the {p} off my order list, I will not be needing it: {o}.",
        "Cancel order {o} please, the {p} is no longer needed.",
        "I want to cancel the {p}. My order number is {o}.",
        "Can you cancel my order? {p}, {o}",
        "Please stop {o} from going out, I don't want the {p}.",
        "A cousin is giving us a {p}, so I have to cancel {o}.",
        "I pressed buy too fast. Please cancel the {p}, {o}.",
        "Has the {p} left yet? If not, cancel it. Order {o}.",
        "Cancel one {p} on {o}, I only wanted one.",
        "Cancel it please, I picked the wrong {p}. Order {o}.",
        "I don't need the {p}, is there a way to cancel {o}?",
        "The {p} won't fit in my kitchen, please cancel order {o}.",
        "My card was used for a {p} I never wanted, cancel {o}.",
        "I would like {o} cancelled. It's the {p}.",
        "Changed plans, cancel the {p}. {o}",
    ],
    "tracking": [
        "Where is my {p}? Order {o} was due on Monday.",
        "Has {o} shipped yet? I'm waiting for the {p}.",
        "no news about my {p} since last week, order {o}. where is it",
        "The courier says delivered but there is no {p} here. Order {o}.",
        "Can you send me the tracking number for {o}, the {p}?",
        "When will the {p} arrive? My order is {o}.",
        "My {p} has been stuck in the depot for five days. {o}",
        "Order {o} still says processing. When does the {p} leave?",
        "Tracking for {o} doesn't load. Is the {p} on its way?",
        "I was home all day and nobody brought the {p}. Whats going on with {o}?",
        "Could you check the delivery status of my {p}, {o}?",
        "Still waiting on a {p}, ordered ten days ago ({o}). Any update?",
        "Did you send out the {p}? I have no email about {o}.",
        "Which day will {o} be delivered? Its a {p}.",
        "the {p} from {o} never turned up, can you find out where it went",
        "My parcel is late. {p}, order {o}. How much longer?",
        "Where is order {o}? I still don't have my {p}.",
        "My {p} should be here by now. Can you track {o}?",
        "When do you deliver {o}? I ordered a {p}.",
        "{o} has been in the same place for days. When will the {p} come?",
        "I expected the {p} last week. Any news? {o}",
        "I have been waiting for the {p} since Tuesday, where is it? {o}",
        "Has my {p} been sent? {o}",
        "What day should I expect the {p}? It's order {o}.",
        "My {p} did not come today, where is it? {o}",
        "Track {o} for me please, the {p} is late.",
        "The {p} was meant to be delivered yesterday. Where is order {o}?",
        "I got one box but not the {p}. Where is it? {o}",
        "Could you tell me when the {p} gets delivered? {o}",
        "Is {o} lost? The {p} has not arrived.",
    ],
    "invoice": [
        "Please send me an invoice for order {o}, the {p}.",
        "I need a receipt for the {p}. Order {o}.",
        "could you email the bill for {o}? it was a {p}",
        "There was no invoice in the box with my {p}. Can I have one for {o}?",
        "My accountant wants a VAT invoice for the {p}, order number {o}.",
        "The invoice for {o} has the old company name. Please correct it, it's the {p}.",
        "Where can I download the receipt for my {p}? {o}",
        "I claim the {p} as a work expense, so I need proof of purchase for {o}.",
        "Can you put our tax number on the invoice of {o}? We bought a {p}.",
        "Lost the receipt of my {p} and the warranty asks for it. Order {o}.",
        "Kindly write me a bill on paper, order {o}, item {p}.",
        "I paid for the {p} ({o}) but never got an invoice by email.",
        "pls resend invoice {o}, {p}, pdf if possible",
        "Our office needs a copy of the bill for one {p}, order {o}.",
        "The amount on the receipt for {o} is wrong. The {p} was on sale. Send a new receipt?",
        "Hoping to get an itemised invoice for the {p} in {o}.",
        "Can you send me the invoice for my {p}? Order {o}.",
        "I'd like a receipt for order {o}, one {p}.",
        "My company needs the receipt for the {p}. {o}",
        "I can't find the bill for my {p}. Could you send it again? {o}",
        "Please print the right address on the invoice for {o}, the {p}.",
        "For my taxes I need a receipt of the {p}, {o}.",
        "How do I get an invoice? I bought a {p}, order {o}.",
        "Please post me a paper invoice for the {p}, {o}.",
        "I threw away the receipt for the {p}. Can I get it again? {o}",
        "please mail the receipt for my {p}, {o}",
        "May I have a bill with our company name for {o}, the {p}?",
        "The insurance asks for the receipt of my {p}, order {o}.",
        "Your email had no invoice for the {p}. {o}",
        "Please send the receipt of order {o} to my office, it's a {p}.",
    ],
    "brands": """Cloud|Delta|Flash|Forest|Golden|Home|Lake|Magic|Matrix|North|Ocean|Power|Royal|Silver|Smart|Solar|Spring|
        Star|Union|Winter""",
    "things": """Backpack|Blender|Camera|Chair|Clock|Drill|Fan|Grill|Heater|Helmet|Iron|Jacket|Keyboard|Lamp|
        Mattress|Mirror|Mixer|Oven|Printer|Router|Scale|Sofa|Stove|Suitcase|Tablet|Tent|Toaster|Umbrella|
        Vacuum|Watch""",
    "names": """Maria|Tom|Priya|Jonas|Aisha|Ben|Chloe|Daniel|Elena|Farid|Grace|Hugo|Ines|Jack|Katya|Liam|Mei|
        Nadia|Oscar|Paula|Ravi|Sofia|Tariq|Uma|Victor|Wendy|Yusuf|Zoe|Mr. Allen|Mrs. Novak""",
    "order_ids": (10000, 70000),
    "openings": [
        "Hi,", "Hello,", "Hey,", "Hi there,", "Good morning,", "Hello team,", "Dear support,", "hi", "Hi, {n} here.",
        "hello!",
    ],
    "closings": [
        "Thanks, {n}", "Thank you. {n}", "{n}", "Regards, {n}", "thx", "Best, {n}", "Cheers, {n}", "- {n}", "Thanks!",
    ],
    "remarks": [
        "No rush.", "Please hurry.", "asap please", "I need it by Friday.", "Third time I ask!", "Not happy.",
        "Whenever you can.",
    ],
}  # fmt: skip

TEST = {
    "rows_per_body": 1,
    "refund": [
        "The {p} fell apart in my hands. I'd like the full amount refunded, order {o}.",
        "Still no refund for {o}, and the {p} went back a month ago.",
        "Your {p} is useless, give me my money back. {o}",
        "I mailed the {p} back last Tuesday ({o}). Has my refund been paid out?",
        "refund for {o} please, the {p} never worked",
        "We were billed two times for one {p}. Please refund one of them, order {o}.",
        "The {p} tore on first use, so I want what I paid for {o} returned to my bank.",
        "Am I able to have a refund if I opened the {p}? My order: {o}",
        "The {p} leaks, so I am asking for my money back on {o}.",
        "When will you refund the {p}? You have had it since May. {o}",
    ],
    "cancel": [
        "I bought the wrong {p} just now, cancel {o} please.",
        "Could you cancel {o}? We are moving and the {p} won't fit the new flat.",
        "cancel my order {o}, dont want the {p} anymore",
        "If the {p} hasn't left the warehouse, I wish to cancel. Order: {o}",
        "I ordered two by accident, please cancel one {p}, number {o}.",
        "Please do not ship the {p}. I want order {o} cancelled.",
        "A friend gave me a {p}, so please cancel mine. {o}",
        "Your site won't let me cancel the {p}. Can you cancel {o} on your side?",
        "Sorry, I have to cancel order {o}. We got a {p} from the neighbours.",
        "I clicked the wrong button, please cancel the {p}. Number {o}.",
    ],
    "tracking": [
        "My {p} should have come yesterday, where is it? {o}",
        "Do you know when {o} will get here? It's the {p}.",
        "any idea where my {p} is? ordered on the 2nd, {o}",
        "The driver left no card and no {p}. Can you trace {o}?",
        "What is the delivery date for the {p}? My order number is {o}.",
        "I can't see where {o} is. Has the {p} been shipped?",
        "Is there a tracking link for my {p}? Order {o}.",
        "{o} has not moved since Sunday. When can I expect the {p}?",
        "How long until the {p} is delivered? Order {o}.",
        "My {p} is lost in the post I think. Could you track {o}?",
    ],
    "invoice": [
        "Can I get an invoice for the {p} I bought? Order {o}.",
        "I didn't receive a receipt with the {p}, please send it. {o}",
        "For my tax return I need the invoice of {o} ({p}).",
        "my boss wants the receipt for the {p}. can you send it, order {o}",
        "Please change the name on the invoice for {o}. It was one {p}.",
        "I lost the email with the invoice for the {p}. Could I have it again? {o}",
        "How can I print an invoice for {o}? I purchased a {p}.",
        "Please mail a paper receipt for my {p}, number {o}.",
        "Could you issue a receipt for {o}? It was a {p}.",
        "The bill for my {p} shows the wrong address, please send a new invoice. {o}",
    ],
    "brands": "Earth|Hill|Modern|Moon|Omega|Pacific|Peak|Prime|Queen|Rapid|River|Sigma|Summer|Urban|Vector|Vision",
    "things": """Bench|Bike|Bottle|Carpet|Charger|Desk|Drone|Freezer|Guitar|Hammer|Kettle|Microphone|Monitor|Phone|
        Projector|Scooter|Shelf|Speaker|Rug|Wallet""",
    "names": "Amelie|Bruno|Carmen|Dmitri|Esther|Felix|Gita|Hanna|Ivan|Joy|Kofi|Lucia|Marek|Nils|Olga|Ms. Reed",
    "order_ids": (70000, 100000),
    "openings": ["Good afternoon,", "Hey there,", "Good evening,", "Hello support team,", "Hi all,", "This is {n}."],
    "closings": ["Many thanks, {n}", "Kind regards, {n}", "Thanks a lot!", "Sincerely, {n}", "ty", "Yours, {n}"],
    "remarks": ["It's urgent.", "Take your time.", "Please answer today.", "Hope you can help."],
}  # fmt: skip


def words(text):
    """The items of a list written as "a|b|c", which may span lines."""
    return [word.strip() for word in text.split("|")]


def pick(rng, items):
    # Only random() is promised to give the same numbers in every Python version; choice() and shuffle() are not.
    return items[int(rng.random() * len(items))]


def shuffled(rng, items):
    return [item for _, item in sorted((rng.random(), i, item)[::2] for i, item in enumerate(items))]


def with_typo(rng, template):
    """Drops or swaps one letter of a long word, but not of one the answer depends on."""
    tokens = template.split(" ")
    long = [i for i, token in enumerate(tokens) if token.isalpha() and len(token) >= 6 and not KEY_WORDS.match(token)]
    if not long:
        return template
    i = pick(rng, long)
    k = 2 + int(rng.random() * (len(tokens[i]) - 4))
    word = tokens[i]
    tokens[i] = word[:k] + word[k + 1 :] if rng.random() < 0.5 else word[:k] + word[k + 1] + word[k] + word[k + 2 :]
    return " ".join(tokens)


def build_split(spec, seed):
    """Rows of one split, in a fixed order. Each row carries its message, its answer and the template it came from."""
    rng = random.Random(seed)
    bodies = [(intent, body) for intent in INTENTS for body in spec[intent] for _ in range(spec["rows_per_body"])]
    products = shuffled(rng, [f"{brand} {thing}" for brand in words(spec["brands"]) for thing in words(spec["things"])])
    names, (low, high) = words(spec["names"]), spec["order_ids"]
    order_ids, rows = set(), []
    for (intent, body), product in zip(bodies, products[: len(bodies)], strict=True):
        while True:
            order_id = str(low + int(rng.random() * (high - low)))
            if order_id not in order_ids:
                break
        order_ids.add(order_id)
        opening = pick(rng, spec["openings"]) if rng.random() < 0.5 else ""
        remark = pick(rng, spec["remarks"]) if rng.random() < 0.25 else ""
        closing = pick(rng, spec["closings"]) if rng.random() < 0.4 and "{n}" not in opening else ""
        body = with_typo(rng, body) if rng.random() < 0.15 else body
        if remark and body[-1] not in ".!?":
            body += "."  # otherwise the order number and the next thought run into each other
        shown = "#" + order_id if rng.random() < 0.15 else order_id
        message = " ".join(part for part in (opening, body, remark, closing) if part)
        message = message.format(p=product, o=shown, n=pick(rng, names))
        rows.append({"message": message, "answer": {"intent": intent, "order_id": order_id, "product": product}})
    return shuffled(rng, rows)


def check(train, test):
    """The promises of README.md, checked on the finished rows and on the lists they were drawn from."""
    for intent in INTENTS:
        assert not set(TRAIN[intent]) & set(TEST[intent]), f"body of {intent} in both splits"
    for key in ("brands", "things", "names"):
        assert not set(words(TRAIN[key])) & set(words(TEST[key])), f"{key} in both splits"
    for key in ("openings", "closings", "remarks"):
        assert not set(TRAIN[key]) & set(TEST[key]), f"{key} in both splits"
    for word in words(TEST["brands"]) + words(TEST["things"]):
        assert not any(word in row["message"] for row in train), f"{word!r} of a test product is part of a training message"
    assert not {r["message"] for r in train} & {r["message"] for r in test}
    assert not {r["answer"]["order_id"] for r in train} & {r["answer"]["order_id"] for r in test}
    for row in train + test:
        assert row["answer"]["order_id"] in row["message"] and row["answer"]["product"] in row["message"]
    assert len({r["message"] for r in train}) == len(train) and len({r["message"] for r in test}) == len(test)


def to_line(row):
    roles = (("system", SYSTEM), ("user", row["message"]), ("assistant", json.dumps(row["answer"])))
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in roles]}) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description="Writes train.jsonl and test.jsonl.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder to write to")
    args = parser.parse_args(argv)
    train, test = build_split(TRAIN, SEED), build_split(TEST, SEED + 1)
    check(train, test)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        # Bytes, not text: line ends must not depend on the platform.
        (args.out / f"{name}.jsonl").write_bytes("".join(map(to_line, rows)).encode())
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
