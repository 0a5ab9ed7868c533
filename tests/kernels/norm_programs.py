"""Row programs of residual add + norm and of its backward, in the spellings that graphs give, for the kernel tests."""

from __future__ import annotations

import re


def moved(text: str, index: str) -> str:
    """A program of `norm_program` whose x and whose sum lie in another order than its rows."""
    text = re.sub(r"(in x: tile \w+) \[row\]", rf"\1 [{index}]", text)
    assert "\nout s [row]\n" in text
    return text.replace("\nout s [row]\n", f"\nout s [{index}]\n")


def norm_program(
    norm: str,
    cols: int,
    dtype: str,
    *,
    residual_index: str = "row",
    alpha: float | None = None,
    bias: bool = False,
    weight: str | None = "same",
    eps: float = 1e-5,
    save_stats: bool = False,
    sizes: str = "",
) -> str:
    """The text of `norm(alpha * x + bias + residual) * weight (+ beta)`, whose sum is an output too.

    Args:
        norm: "layer_norm" or "rms_norm".
        cols: number of columns.
        dtype: of the tiles; the arithmetic between the sum and the norm's output is in FP32 (FP64 for f64).
        residual_index: the row index of the residual.
        alpha: DeepNorm's factor on x, rounded to `dtype` before it is added.
        bias: add a per-column vector to x first.
        weight: dtype of the norm's weight, "same" as the tiles', or None for a norm without weights.
        eps: the norm's epsilon.
        save_stats: the row statistics are outputs, as in a graph whose backward will need them.
        sizes: names of the sizes that `residual_index` uses.
    """
    wide = "f64" if dtype == "f64" else "f32"
    weight_dtype = dtype if weight == "same" else weight
    layer_norm = norm == "layer_norm"
    lines = [f"row_program cols={cols}" + (f" sizes={sizes}" if sizes else "")]
    lines += [f"in x: tile {dtype} [row]", f"in r: tile {dtype} [{residual_index}]"]
    lines += [f"in b: col {dtype}"] if bias else []
    lines += [f"in w: col {weight_dtype}"] if weight_dtype else []
    lines += [f"in beta: col {weight_dtype}"] if weight_dtype and layer_norm else []
    x = "x"
    if bias:
        lines.append(f"xb: tile {dtype} = add({x}, b)")
        x = "xb"
    if alpha is not None:
        lines.append(f"xa: tile {dtype} = mul({x}, {alpha!r})")
        x = "xa"
    lines.append(f"s: tile {dtype} = add({x}, r)")
    centred = "s"
    if layer_norm:
        lines += [f"mean: row {wide} = row_mean(s)", f"d: tile {wide} = sub(s, mean)"]
        centred = "d"
    lines += [
        f"q: tile {wide} = mul({centred}, {centred})",
        f"var: row {wide} = row_mean(q)",
        f"ve: row {wide} = add(var, {eps!r})",
        f"rstd: row {wide} = rsqrt(ve)",
        f"n: tile {wide} = mul({centred}, rstd)",
    ]
    y = "n"
    if weight_dtype:
        lines.append(f"nw: tile {wide} = mul(n, w)")
        y = "nw"
        if layer_norm:
            lines.append(f"nwb: tile {wide} = add(nw, beta)")
            y = "nwb"
    if dtype != wide:
        lines.append(f"y: tile {dtype} = cast({y})")
        y = "y"
    lines += ["out s [row]", f"out {y} [row]"]
    if save_stats:
        lines += ["out mean [row]"] * layer_norm + ["out rstd [row]"]
    return "\n".join(lines)


def norm_backward_program(
    norm: str,
    cols: int,
    dtype: str,
    *,
    residual: bool = True,
    sums: bool = True,
    dropout: float | None = None,
) -> str:
    """The text of the backward of `norm_program` with weights: dx from dy, plus what the sum's own gradient is.

    The outputs are dx, then (with dropout) the gradient of what was dropped, then the sums over the rows: d gamma, d
    beta of a LayerNorm, and the bias gradient of a Linear in front.

    Args:
        norm: "layer_norm" or "rms_norm".
        cols: number of columns.
        dtype: of the tiles and weights; the arithmetic is in FP32 (FP64 for f64).
        residual: the sum has a gradient of its own, `ds`, that is added.
        sums: take the sums over the rows.
        dropout: the probability with which a dropout in front, whose mask was saved, has dropped an element.
    """
    wide = "f64" if dtype == "f64" else "f32"
    layer_norm = norm == "layer_norm"
    lines = [f"row_program cols={cols}"]
    lines += [f"in dy: tile {dtype} [row]", f"in w: col {dtype}", f"in s: tile {dtype} [row]"]
    lines += [f"in mean: row {wide} [row]"] if layer_norm else []
    lines += [f"in rstd: row {wide} [row]"]
    lines += [f"in ds: tile {dtype} [row]"] if residual else []
    lines += ["in mask: tile b8 [row]"] if dropout is not None else []
    dy = "dy"
    if dtype != wide:
        lines.append(f"dyw: tile {wide} = cast(dy)")
        dy = "dyw"
    lines.append(f"dn: tile {wide} = mul({dy}, w)")
    lines += _LAYER_NORM_BACKWARD.format(wide=wide, cols=cols).splitlines() if layer_norm else []
    lines += [] if layer_norm else _RMS_NORM_BACKWARD.format(wide=wide, cols=cols).splitlines()
    if dtype != wide:
        lines.append(f"dnar: tile {dtype} = cast(dxw)")
    dx = "dnar" if dtype != wide else "dxw"
    if residual:
        lines.append(f"dx: tile {dtype} = add(ds, {dx})")
        dx = "dx"
    outputs, last = [f"out {dx} [row]"], dx
    if dropout is not None:
        lines += [f"keep: tile {dtype} = cast(mask)", f"scaled: tile {dtype} = mul(keep, {1 / (1 - dropout)!r})"]
        lines += [f"dr: tile {dtype} = mul({dx}, scaled)"]
        outputs, last = [*outputs, "out dr [row]"], "dr"
    if sums:
        lines += [f"dyn: tile {wide} = mul({dy}, normed)", f"dgamma: col {dtype} = col_sum(dyn)"]
        lines += [f"dbeta: col {dtype} = col_sum({dy})"] if layer_norm else []
        lines += [f"dbias: col {dtype} = col_sum({last})"]
        outputs += ["out dgamma", *(["out dbeta"] if layer_norm else []), "out dbias"]
    return "\n".join([*lines, *outputs])


_LAYER_NORM_BACKWARD = """dnc: tile {wide} = mul(dn, {cols}.0)
total: row {wide} = row_sum(dn)
centred: tile {wide} = sub(s, mean)
normed: tile {wide} = mul(centred, rstd)
p: tile {wide} = mul(dn, normed)
along: row {wide} = row_sum(p)
projected: tile {wide} = mul(normed, along)
rest: tile {wide} = sub(dnc, total)
rest2: tile {wide} = sub(rest, projected)
scale: row {wide} = div(rstd, {cols}.0)
dxw: tile {wide} = mul(scale, rest2)"""

_RMS_NORM_BACKWARD = """normed: tile {wide} = mul(s, rstd)
p: tile {wide} = mul(dn, s)
along: row {wide} = row_sum(p)
direct: tile {wide} = mul(dn, rstd)
rstd2: row {wide} = mul(rstd, rstd)
rstd3: row {wide} = mul(rstd2, rstd)
half: row {wide} = mul(along, -0.5)
curved: row {wide} = mul(half, rstd3)
scale: row {wide} = div(curved, {cols}.0)
doubled: tile {wide} = mul(s, 2.0)
projected: tile {wide} = mul(scale, doubled)
dxw: tile {wide} = add(direct, projected)"""


POINTWISE_PROGRAM = """row_program cols={cols}
in x: tile {dtype} [row]
in g: row f32 [row]
in t: scalar f32
in c: col f32
cc: col f32 = mul(c, 0.5)
ct: col f32 = add(cc, t)
a: tile f32 = tanh(x)
b: tile f32 = sigmoid(a)
e: tile f32 = exp(b)
f: tile f32 = erf(e)
h: tile f32 = div(f, 3.0)
i: tile f32 = abs(x)
j: tile f32 = sqrt(i)
k: tile f32 = relu(x)
l: tile f32 = maximum(j, k)
m: tile f32 = minimum(l, ct)
n: tile f32 = fma(m, g, h)
o: tile f32 = neg(n)
big: row f32 = row_max(o)
small: row f32 = row_min(o)
total: row f32 = row_sum(o)
span: row f32 = sub(big, small)
p: tile f32 = sub(o, big)
rr: row f32 = reciprocal(span)
u: tile f32 = mul(p, rr)
v: tile {dtype} = add(u, total)
out v [row]
out big [row]
out small [row]
out g [row]
"""


QUANTISED_PROGRAM = """row_program cols={cols}
in x: tile {dtype} [row]
a: tile f32 = abs(x)
m: row f32 = row_max(a)
e: row f32 = maximum(m, 1e-12)
s8: row f32 = div(e, 127.0)
q: tile f32 = div(x, s8)
n: tile f32 = round(q)
l: tile f32 = maximum(n, -128.0)
h: tile f32 = minimum(l, 127.0)
i: tile i8 = cast(h)
s4: row f32 = div(e, 448.0)
f: tile f32 = div(x, s4)
g: tile f32 = maximum(f, -448.0)
k: tile f32 = minimum(g, 448.0)
w: tile {fp8} = cast(k)
out i [row]
out s8 [row]
out w [row]
out s4 [row]
"""
"""Dynamic quantisation of each row, to int8 and to FP8. Nothing in it is approximate."""
