"""The environments that select a strategy inside a launch of a CPU config, and what a test may assert of the result."""

NO_FSDP = {"ACCELERATE_USE_FSDP": "false"}
FSDP1 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_USE_ORIG_PARAMS": "false",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_SYNC_MODULE_STATES": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def assert_sharded(facts: list[dict], version: int, replicated: str | None = None) -> None:
    """Every parameter is a shard, and over all ranks each element is held once (FSDP1 pads a little).

    Args:
        facts: what tests/probe.py saw, one entry for each rank.
        replicated: a name fragment of trained parameters that FSDP1 leaves on every rank on purpose.
    """
    world = len(facts)
    assert world > 1 and all(fact["world"] == world for fact in facts)
    kind = {1: "FlatParameter", 2: "DTensor"}[version]
    total = held = 0
    for rank, fact in enumerate(facts):
        assert fact[f"fsdp{version}_units"] > 2, f"rank {rank} has no wrapped units"
        for parameter in fact["parameters"]:
            if replicated and replicated in parameter["name"]:
                continue
            assert parameter["kind"] == kind, f"rank {rank}: {parameter['name']} is a {parameter['kind']}"
            held += parameter["local"]
            total += parameter["full"] / world
            if version == 1:
                assert parameter["local"] <= parameter["full"] / world + 8, parameter
    assert total - 1 <= held <= total * 1.1, f"{held} elements are held of {total}"
    shares = [sum(p["local"] for p in fact["parameters"]) for fact in facts]
    assert max(shares) < 0.75 * sum(shares), f"one rank holds most of the model: {shares}"


def assert_frozen(facts: list[dict]) -> None:
    for fact in facts:
        assert fact["frozen_before"] == fact["frozen_after"], "a frozen weight changed"


def losses(fact: dict) -> list[float]:
    return [row["loss"] for row in fact["history"] if "loss" in row]
