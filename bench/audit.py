"""Suite `audit`: the GPU kernels compiled for each architecture, without a GPU, and read from their machine code.

The same table as `python -m fusepass audit`. `quick` takes three widths and one NVIDIA architecture.
"""

from __future__ import annotations

from fusepass.kernels.audit import audit_table

from .suite import Options, Row, Table


def run(options: Options) -> Table:
    """Compile and read every kernel."""
    rows: list[Row] = list(audit_table((768, 4096, 16384), ("sm_90",)) if options.quick else audit_table())
    spilled = [r for r in rows if r["spills"]]
    above = [r for r in rows if r["tile_loads"] + r["tile_stores"] > r["floor"]]
    return Table(
        "audit",
        rows,
        [
            f"{len(rows)} kernels, {len(spilled)} with spills, at most {max(r['registers'] for r in rows)} registers",
            f"{len(above)} move more tiles than the floor: {', '.join(sorted({r['kernel'] for r in above})) or 'none'}",
        ],
    )
