"""Known accelerators by name, and those of this machine: how much memory a process can have."""

import dataclasses
import difflib
import re
from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One accelerator. What is not known of a card is None."""

    name: str
    memory: int  # bytes, the total that CUDA reports: less than the label says, since the driver keeps some
    capability: tuple[int, int] | None = None  # CUDA compute capability; None on AMD


# Memory: the "total capacity" in PyTorch's out-of-memory messages with current drivers, the smallest where they differ
# (drivers keep more or less of it; ECC takes a sixteenth of GDDR).
# GiB, compute capability, other names
KNOWN = {
    "t4": (14.56, (7, 5), ""),
    "v100-16gb": (15.77, (7, 0), "v100-sxm2-16gb v100-pcie-16gb"),
    "v100-32gb": (31.73, (7, 0), "v100-sxm2-32gb v100-sxm3-32gb v100-pcie-32gb"),
    "3060-12gb": (11.62, (8, 6), "3060"),
    "3090": (23.56, (8, 6), "3090-24gb"),
    "4070ti": (11.62, (8, 9), "4070ti-12gb"),
    "4070ti-super": (15.57, (8, 9), "4070ti-super-16gb"),
    "4080": (15.57, (8, 9), "4080-16gb 4080-super"),
    "4090": (23.52, (8, 9), "4090-24gb"),
    "5090": (31.36, (12, 0), "5090-32gb"),
    "a10": (21.98, (8, 6), "a10-24gb"),
    "a10g": (21.96, (8, 6), "a10g-24gb"),
    "l4": (22.03, (8, 9), "l4-24gb"),
    "l40s": (44.39, (8, 9), "l40s-48gb"),
    "a6000": (47.40, (8, 6), "a6000-48gb"),
    "rtx6000-ada": (47.37, (8, 9), "6000-ada-48gb"),
    "a100-40gb": (39.38, (8, 0), "a100-sxm4-40gb a100-pcie-40gb"),
    "a100-80gb": (79.14, (8, 0), "a100-sxm4-80gb a100-pcie-80gb a100-80gb-pcie"),
    "h100-80gb": (79.10, (9, 0), "h100 h100-sxm h100-80gb-hbm3"),
    "h100-pcie": (79.10, (9, 0), "h100-pcie-80gb"),
    "h100-nvl": (93.00, (9, 0), "h100-nvl-94gb"),
    "h200": (139.72, (9, 0), "h200-141gb h200-sxm"),
    "b200": (178.35, (10, 0), "b200-180gb"),
    "gb200": (184.31, (10, 0), ""),
    "mi250x": (63.98, None, ""),  # one of its two dies, which are two devices
    "mi300x": (191.69, None, "mi300x-oam"),
}  # fmt: skip


def _plain(name: str) -> str:
    """A name without what people write or leave out: "NVIDIA GeForce RTX 4090" -> "4090"."""
    name = re.sub(r"nvidia|geforce|rtx|tesla|amd|instinct|generation", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\s*gi?b\b", r"\1", name))


def find(name: str) -> Card:
    """The card called `name`, in any spelling, or any card with so much memory if it is a size (`48GiB`, `48gb`).

    Raises:
        ValueError: it is none of the known ones, or more than one.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb)", name.strip().lower())
    if size:
        memory = int(float(size[1]) * (GIB if size[2] == "gib" else 10**9))
        if memory < GIB:
            raise ValueError(f"--gpu {name} is less than 1 GiB: name a card, or its memory, such as 48GiB")
        return Card(name, memory)
    names = {_plain(other): card for card, facts in KNOWN.items() for other in (card, *facts[-1].split())}
    wanted = _plain(name)
    if wanted in names:
        card = names[wanted]
        size, *facts, _ = KNOWN[card]
        return Card(card, int(size * GIB), *facts)
    versions = [card for card in KNOWN if wanted and card.startswith(f"{wanted}-")]
    if versions:
        raise ValueError(f"--gpu {name} comes with different memory: name one of {', '.join(versions)}")
    near = list(dict.fromkeys(names[other] for other in difflib.get_close_matches(wanted, names, n=3)))
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(KNOWN)}"
    raise ValueError(f"--gpu {name} is not a known card; {hint} A size works too: --gpu 48GiB")


def present() -> list[Card]:
    """The CUDA or ROCm devices of this machine with their real memory, in order; none without a device."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        try:
            card = find(device.name)
        except ValueError:
            card = Card(device.name, 0, capability=None if torch.version.hip else (device.major, device.minor))
        found.append(dataclasses.replace(card, memory=device.total_memory))
    return found
