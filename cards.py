"""Known accelerators by name, and those of this machine: how much memory a process can have, and how fast they are."""

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
    tflops: float | None = None  # dense 16-bit matrix products, summed in float32; bf16, or fp16 below capability 8
    bandwidth: int | None = None  # GB/s of its memory
    link: str | None = None  # to other cards of the machine: "NVLink", "PCIe" or "Infinity Fabric"
    capability: tuple[int, int] | None = None  # CUDA compute capability; None on AMD
    host_link: float | None = None  # GB/s from and to the RAM of the machine, each way


# Memory: the "total capacity" in PyTorch's out-of-memory messages with current drivers, the smallest where they differ
# (drivers keep more or less of it; ECC takes a sixteenth of GDDR). The rest: the vendors' data sheets.
# GiB, TFLOPs, GB/s, link, capability, GB/s to the host, other names
KNOWN = {
    "t4": (14.56, 65, 320, "PCIe", (7, 5), 16, ""),
    "v100-16gb": (15.77, 125, 900, "NVLink", (7, 0), 16, "v100-sxm2-16gb v100-pcie-16gb"),
    "v100-32gb": (31.73, 125, 900, "NVLink", (7, 0), 16, "v100-sxm2-32gb v100-sxm3-32gb v100-pcie-32gb"),
    "3060-12gb": (11.62, 25, 360, "PCIe", (8, 6), 32, "3060"),
    "3090": (23.56, 71, 936, "PCIe", (8, 6), 32, "3090-24gb"),
    "4070ti": (11.62, 80, 504, "PCIe", (8, 9), 32, "4070ti-12gb"),
    "4070ti-super": (15.57, 88, 672, "PCIe", (8, 9), 32, "4070ti-super-16gb"),
    "4080": (15.57, 97, 717, "PCIe", (8, 9), 32, "4080-16gb 4080-super"),
    "4090": (23.52, 165, 1008, "PCIe", (8, 9), 32, "4090-24gb"),
    "5090": (31.36, 209, 1792, "PCIe", (12, 0), 64, "5090-32gb"),
    "a10": (21.98, 125, 600, "PCIe", (8, 6), 32, "a10-24gb"),
    "a10g": (21.96, 70, 600, "PCIe", (8, 6), 32, "a10g-24gb"),
    "l4": (22.03, 121, 300, "PCIe", (8, 9), 32, "l4-24gb"),
    "l40s": (44.39, 362, 864, "PCIe", (8, 9), 32, "l40s-48gb"),
    "a6000": (47.40, 155, 768, "PCIe", (8, 6), 32, "a6000-48gb"),
    "rtx6000-ada": (47.37, 364, 960, "PCIe", (8, 9), 32, "6000-ada-48gb"),
    "a100-40gb": (39.38, 312, 1555, "NVLink", (8, 0), 32, "a100-sxm4-40gb a100-pcie-40gb"),
    "a100-80gb": (79.14, 312, 2039, "NVLink", (8, 0), 32, "a100-sxm4-80gb a100-pcie-80gb a100-80gb-pcie"),
    "h100-80gb": (79.10, 989, 3350, "NVLink", (9, 0), 64, "h100 h100-sxm h100-80gb-hbm3"),
    "h100-pcie": (79.10, 756, 2039, "PCIe", (9, 0), 64, "h100-pcie-80gb"),
    "h100-nvl": (93.00, 835, 3938, "NVLink", (9, 0), 64, "h100-nvl-94gb"),
    "h200": (139.72, 989, 4800, "NVLink", (9, 0), 64, "h200-141gb h200-sxm"),
    "b200": (178.35, 2250, 8000, "NVLink", (10, 0), 64, "b200-180gb"),
    "gb200": (184.31, 2500, 8000, "NVLink", (10, 0), 225, ""),
    "mi250x": (63.98, 191, 1638, "Infinity Fabric", None, 32, ""),  # one of its two dies, which are two devices
    "mi300x": (191.69, 1307, 5300, "Infinity Fabric", None, 64, "mi300x-oam"),
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
