"""`[simulate]`: what `diloco simulate` assumes of islands, links, losses and prices. No part of a run's identity.

The defaults are those of spot machines in several regions around one object store. Every value of `IslandAssumptions`
may be overridden for one island in `[islands.NAME.simulate]`.
"""

from __future__ import annotations

from pydantic import Field

from diloco_runtime.config import Settings


class IslandAssumptions(Settings):
    """What is assumed of one island."""

    step_seconds: float = Field(1.0, gt=0)
    """Seconds of one inner step, on average."""
    step_spread: float = Field(0.05, ge=0, lt=1)
    """Standard deviation of the time of an inner step over its mean, drawn anew for every step."""
    pause_seconds: float = Field(0.0, ge=0)
    """Seconds that every offer and every adoption keeps the learner from its next inner step: copying a fragment."""
    latency: float = Field(0.05, ge=0)
    """Seconds of a request to the store besides the transfer of its payload; 0.001 for a folder of this machine."""
    up_gbits: float = Field(2.0, gt=0)
    """Gbit/s from the island to the store. Decoupled DiLoCo ran over 2 to 5 Gbit/s between regions."""
    down_gbits: float = Field(2.0, gt=0)
    """Gbit/s from the store to the island."""
    mtbf_hours: float = Field(10.0, ge=0)
    """Mean hours from a start of the island to its loss (exponential); 0: never lost. The default is a guess for spot
    machines: Google's live 24 hours at most (arXiv 1911.05160), others differ by type and zone (see the traces of
    skypilot-org/spot-traces)."""
    recovery_seconds: float = Field(300.0, ge=0)
    """Seconds from the launch of a lost island until its processes start: provisioning, boot, set-up. The supervisor's
    own pause before a launch (provider.relaunch_after) comes before; 0 where islands are processes."""
    start_seconds: float = Field(60.0, ge=0)
    """Seconds from the start of the processes until the first inner step besides the download of the model: imports,
    building, compiling."""
    price_per_hour: float = Field(0.0, ge=0)
    """Dollars per hour for the island's machines while they are rented, recovery included."""
    egress_up: float = Field(0.0, ge=0)
    """Dollars per GB from the island to the store, charged by the island's cloud: 0.02 between regions of one cloud,
    0.09 to 0.12 through the internet, 0 within a region."""
    egress_down: float = Field(0.0, ge=0)
    """Dollars per GB from the store to the island, charged by the store's cloud: as `egress_up`; 0 on R2."""


class SimulateTable(IslandAssumptions):
    """Assumptions for all islands, and what there is only one of."""

    parameters: int | None = Field(None, ge=1)
    """Own tasks: parameters of the model. The built-in model is counted."""
    tokens_per_sample: int | None = Field(None, ge=1)
    """Own tasks: tokens that a sample counts for, 1 if absent. The built-in model's is inner.sequence_length."""
    price_per_million_writes: float | None = Field(None, ge=0)
    """Dollars per million creates, puts and listings. Absent: what the store's service charges (`store_prices`)."""
    price_per_million_reads: float | None = Field(None, ge=0)
    """Dollars per million other requests. Absent: likewise."""


def of_island(everywhere: SimulateTable, own: IslandAssumptions) -> IslandAssumptions:
    """Return what is assumed of one island: its own values where it sets any, else those for all islands."""
    general = {name: getattr(everywhere, name) for name in IslandAssumptions.model_fields}
    return IslandAssumptions.model_validate({**general, **own.model_dump(exclude_unset=True)})
