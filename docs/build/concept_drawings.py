"""Drawings of docs/concepts.md: docs/concepts/*.svg.

    python -m docs.build.concept_drawings

Timetables are those that the schedules build, played with a backward twice as long as a forward;
parts of memory are to scale. Each file has a title and a description, and a ground of its own, so
that it is legible on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from planner.language.schedule import build_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate

FOLDER = Path(__file__).parents[1] / "concepts"
INK, FAINT, LINE, GROUND, DEVICE = "#1d2329", "#5c6670", "#c3cad2", "#ffffff", "#eef2f6"
BLUE, ORANGE, GREEN, PURPLE, YELLOW = "#a9cbee", "#f4c28b", "#a9d8b5", "#d3bbe3", "#f0dd8f"
SHADES = (BLUE, ORANGE, GREEN, PURPLE)
WIDTH = 760


class Drawing:
    """Shapes, put into an SVG; mutable."""

    def __init__(self, name: str, title: str, description: str, height: int) -> None:
        self.name, self.title, self.description, self.height = name, title, description, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", *,
        fill: str = GROUND, dashed: bool = False, size: int = 13, line: str = FAINT,
    ) -> None:  # fmt: skip
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" '
            f'stroke="{line}"{dash}/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + size * 0.36, text, size=size)

    def text(
        self, x: float, y: float, text: str, *, size: int = 13, color: str = INK,
        anchor: str = "middle", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, *, both: bool = False, color: str = INK
    ) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{color}" stroke-width="1.6" '
            f'fill="none" marker-end="url(#head)"{start}/>'
        )

    def device(self, x: float, y: float, w: float, h: float, name: str) -> None:
        self.box(x, y, w, h, fill=DEVICE, line=LINE)
        self.text(x + w / 2, y + 18, name, bold=True)

    def save(self) -> None:
        body = "\n".join(self.parts)
        (FOLDER / f"{self.name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" role="img" aria-labelledby="title told" '
            'font-family="system-ui, DejaVu Sans, sans-serif">\n'
            f'<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="told">{escape(self.description)}</desc>\n'
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" '
            f'fill="{INK}"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="{GROUND}"/>\n'
            f"{body}\n</svg>\n"
        )


def _devices(drawing: Drawing, y: float, h: float, count: int = 4) -> Iterator[tuple[int, float]]:
    """Draw devices side by side; yield (number, left edge) of each, 160 wide."""
    gap = (WIDTH - 40 - 160 * count) / (count - 1)
    for number in range(count):
        x = 20 + number * (160 + gap)
        drawing.device(x, y, 160, h, f"device {number}")
        yield number, x


def data_parallel() -> Drawing:
    drawing = Drawing(
        "data-parallel", "Data parallel",
        "Four devices. Each holds all four layers of the model and a quarter of the batch. "
        "Arrows between them: gradients are summed once a step.", 270,
    )  # fmt: skip
    for number, x in _devices(drawing, 14, 190):
        for layer in range(4):
            drawing.box(x + 20, 76 + 30 * layer, 120, 24, f"layer {layer}", fill=BLUE)
        drawing.box(x + 20, 40, 120, 26, f"samples {2 * number}, {2 * number + 1}", fill=YELLOW)
        if number < 3:
            drawing.arrow(x + 80, 226, x + 80 + 186, 226, both=True)
        drawing.arrow(x + 80, 206, x + 80, 224)
    drawing.text(380, 252, "once a step: gradients are summed, so all copies stay equal")
    return drawing


def tensor_parallel() -> Drawing:
    drawing = Drawing(
        "tensor-parallel", "Tensor parallel",
        "Four devices. Each holds a quarter of every layer's matrix, coloured, beside the dashed "
        "outline of the whole. All work on the same samples and exchange results in each layer.",
        262,
    )  # fmt: skip
    for number, x in _devices(drawing, 14, 166):
        drawing.box(x + 20, 40, 120, 26, "samples 0 to 7", fill=YELLOW)
        for layer in range(3):
            y = 74 + 34 * layer
            drawing.box(x + 20, y, 120, 28, dashed=True)
            drawing.box(x + 20 + 30 * number, y, 30, 28, f"{layer}", fill=SHADES[number])
        if number < 3:
            drawing.arrow(x + 80, 206, x + 80 + 186, 206, both=True)
        drawing.arrow(x + 80, 182, x + 80, 204)
    drawing.text(380, 232, "in every layer: results of the parts are put together")
    drawing.text(380, 250, "a number is a layer; a strip is a quarter of its matrix",
                 size=12, color=FAINT)  # fmt: skip
    return drawing


def _timetable(drawing: Drawing, y: float, schedule: str, vpp: int, *, scale: float) -> float:
    """Draw what 4 ranks do in a step of 8 microbatches; return when it ends, in forwards."""
    stages = 4 * vpp
    part = 1 / vpp
    times = JobSeconds.of_stages(
        forward_s=(part,) * stages,
        backward_input_s=(part,) * stages,
        backward_weight_s=(part,) * stages,
    )
    table = simulate(build_schedule(schedule, pp=4, vpp=vpp, num_microbatches=8), times)
    for rank, jobs in enumerate(table.schedule.jobs):
        drawing.text(20, y + 26 * rank + 16, f"rank {rank}", anchor="start")
        drawing.box(74, y + 26 * rank, table.makespan_s * scale, 22, fill="#e4e7eb", line=LINE)
        starts, ends = table.start_s[rank], table.end_s[rank]
        for job, start, end in zip(jobs, starts, ends, strict=True):
            chunk = job.stage_index // 4
            fill = (BLUE, "#6fa3d8")[chunk] if str(job.kind) == "F" else (ORANGE, "#e59a45")[chunk]
            drawing.box(
                74 + start * scale, y + 26 * rank, (end - start) * scale, 22,
                f"{job.microbatch_index}" if (end - start) * scale > 9 else "",
                fill=fill, size=10, line=GROUND,
            )  # fmt: skip
    return table.makespan_s


def _legend(drawing: Drawing, y: float, *, chunks: bool = False, idles: bool = True) -> None:
    entries = [(BLUE, "forward"), (ORANGE, "backward"), *[("#e4e7eb", "idle")] * idles]
    if chunks:
        entries = [(BLUE, "forward, first stage"), ("#6fa3d8", "second stage"),
                   (ORANGE, "backward, first stage"), ("#e59a45", "second stage"),
                   ("#e4e7eb", "idle")]  # fmt: skip
    x = 74.0
    for fill, text in entries:
        drawing.box(x, y, 14, 14, fill=fill, line=LINE)
        drawing.text(x + 20, y + 12, text, size=12, anchor="start")
        x += 40 + 7.2 * len(text)


def pipeline() -> Drawing:
    drawing = Drawing(
        "pipeline", "Pipeline",
        "Above: four devices hold two layers each; activations go from one to the next. Below: "
        "what each does over a step of eight microbatches. The first and the last part of the "
        "step are idle on some devices: the pipeline fills and drains.", 300,
    )  # fmt: skip
    for number, x in _devices(drawing, 14, 92):
        for layer in range(2):
            drawing.box(
                x + 20, 40 + 30 * layer, 120, 24, f"layer {2 * number + layer}",
                fill=SHADES[number],
            )  # fmt: skip
        if number < 3:
            drawing.arrow(x + 162, 60, x + 184, 60)
    _timetable(drawing, 130, "1f1b", 1, scale=20)
    _legend(drawing, 246)
    drawing.text(74, 286, "time to the right; a number is a microbatch (schedule 1f1b)",
                 size=12, color=FAINT, anchor="start")  # fmt: skip
    return drawing


def virtual_pipeline() -> Drawing:
    drawing = Drawing(
        "virtual-pipeline", "Virtual pipeline",
        "The step of the drawing before, above, and below the same work with two stages on each "
        "rank, half as long: the pipeline fills and drains in half the time and the step ends "
        "earlier.", 330,
    )  # fmt: skip
    drawing.text(74, 22, "one stage a rank", anchor="start", bold=True)
    _timetable(drawing, 32, "1f1b", 1, scale=20)
    drawing.text(74, 164, "two stages a rank: rank 0 holds layers 0 and 4, rank 1 layers 1 and 5, "
                 "...", anchor="start", bold=True)  # fmt: skip
    _timetable(drawing, 174, "interleaved_1f1b", 2, scale=20)
    _legend(drawing, 292, chunks=True)
    return drawing


def zero() -> Drawing:
    drawing = Drawing(
        "zero", "ZeRO stages",
        "What one of four data-parallel devices holds, to scale, in bf16. No ZeRO: 2 bytes of "
        "weights, 4 of gradients and 12 of optimizer for a parameter. Stage 1 holds a quarter of "
        "the optimizer, stage 2 of the gradients too, stage 3 of the weights too.", 250,
    )  # fmt: skip
    parts = (("weights", 2, BLUE), ("gradients", 4, GREEN), ("optimizer", 12, PURPLE))
    names = ("no ZeRO", "ZeRO 1", "ZeRO 2", "ZeRO 3")
    for stage, name in enumerate(names):
        y, x, held = 20 + 46 * stage, 100.0, 0.0
        drawing.text(20, y + 22, name, anchor="start", bold=True)
        for place, (part, size, fill) in enumerate(parts):
            share = size / 4 if stage >= 3 - place else size
            drawing.box(x, y, share * 26, 34, part if share * 26 > 70 else "", fill=fill)
            x += share * 26
            held += share
        drawing.text(x + 10, y + 22, f"{held:g} bytes a parameter", anchor="start", color=FAINT)
    x = 100.0
    for part, _, fill in parts:
        drawing.box(x, 212, 14, 14, fill=fill, line=LINE)
        drawing.text(x + 20, 224, part, size=12, anchor="start")
        x += 110
    return drawing


def recompute() -> Drawing:
    drawing = Drawing(
        "recompute", "Recomputation",
        "Above: a forward of six ops saves six results for the backward. Below: it saves the "
        "first alone; the backward first computes the others again.", 250,
    )  # fmt: skip
    for row, (name, is_saved) in enumerate(
        (("everything is saved", [True] * 6), ("recomputed", [True] + [False] * 5))
    ):
        y = 20 + 116 * row
        drawing.text(20, y + 14, name, anchor="start", bold=True)
        for op in range(6):
            x = 20 + 80 * op
            drawing.box(x, y + 24, 62, 26, f"op {op}", fill=BLUE)
            if op < 5:
                drawing.arrow(x + 62, y + 37, x + 79, y + 37)
            drawing.box(
                x + 8, y + 60, 46, 22, "saved" if is_saved[op] else "", size=11,
                fill=YELLOW if is_saved[op] else GROUND, dashed=not is_saved[op],
            )  # fmt: skip
        drawing.arrow(482, y + 37, 520, y + 37)
        if row:
            drawing.box(522, y + 24, 106, 26, "ops 1-5 again", fill=BLUE)
            drawing.arrow(628, y + 37, 645, y + 37)
            drawing.box(647, y + 24, 100, 26, "backward", fill=ORANGE)
        else:
            drawing.box(522, y + 24, 100, 26, "backward", fill=ORANGE)
    drawing.text(20, 238, "dashed: not held between forward and backward", size=12, color=FAINT,
                 anchor="start")  # fmt: skip
    return drawing


def context_parallel() -> Drawing:
    drawing = Drawing(
        "context-parallel", "Context parallel",
        "One sequence of sixteen tokens above. Four devices below hold four tokens each and all "
        "layers. Keys and values go round a ring, as each token looks at those before it.", 270,
    )  # fmt: skip
    for token in range(16):
        drawing.box(60 + 40 * token, 14, 36, 26, f"{token}", fill=SHADES[token // 4], size=12)
    drawing.text(56, 32, "tokens", anchor="end", size=12)
    for number, x in _devices(drawing, 66, 110):
        first = 4 * number
        drawing.box(x + 14, 94, 132, 26, f"tokens {first} to {first + 3}", fill=SHADES[number])
        drawing.box(x + 14, 132, 132, 26, "all layers", fill=DEVICE)
        drawing.arrow(60 + 160 * number + 78, 42, x + 80, 64, color=FAINT)
        if number < 3:
            drawing.arrow(x + 162, 107, x + 184, 107)
    drawing.arrow(660, 178, 660, 206)
    drawing.parts.append(
        f'<path d="M660 206 L100 206 L100 180" stroke="{INK}" stroke-width="1.6" fill="none" '
        'marker-end="url(#head)"/>'
    )
    drawing.text(380, 232, "in every layer: keys and values go round, so that each token sees the "
                 "others")  # fmt: skip
    return drawing


def expert_parallel() -> Drawing:
    drawing = Drawing(
        "expert-parallel", "Expert parallel",
        "Four devices, each with its tokens above and two of eight experts below. A router picks "
        "experts for each token; arrows go from every device to every other.", 290,
    )  # fmt: skip
    edges = []
    for number, x in _devices(drawing, 14, 70):
        drawing.box(x + 14, 42, 132, 26, f"tokens of device {number}", fill=YELLOW, size=12)
        edges.append(x + 80)
    for start in edges:
        for end in edges:
            drawing.arrow(start, 86, end, 158, color=FAINT if start != end else INK)
    for number, x in enumerate(edges):
        left = x - 80
        drawing.box(left, 162, 160, 66, fill=DEVICE, line=LINE)
        for expert in range(2):
            drawing.box(
                left + 12 + 70 * expert, 180, 64, 30, f"expert {2 * number + expert}",
                fill=SHADES[number], size=12,
            )  # fmt: skip
    drawing.text(380, 252, "in every layer: tokens travel to their experts, and results back")
    drawing.text(380, 272, "an upper and a lower box are one device", size=12, color=FAINT)
    return drawing


def offload() -> Drawing:
    drawing = Drawing(
        "offload", "Offload",
        "A device with little memory and a host with much. Saved activations are copied to the "
        "host after the forward of their layers and come back before their backward; copies run "
        "beside compute.", 270,
    )  # fmt: skip
    drawing.device(20, 14, 300, 96, "device")
    drawing.box(36, 44, 130, 50, "weights", fill=BLUE)
    drawing.box(176, 44, 130, 50, "activations in use", fill=YELLOW, size=12)
    drawing.device(440, 14, 300, 96, "host")
    drawing.box(456, 44, 130, 50, "optimizer", fill=PURPLE)
    drawing.box(596, 44, 130, 50, "waiting activations", fill=YELLOW, size=12)
    drawing.arrow(322, 62, 438, 62, both=True)
    drawing.text(380, 52, "a slow link", size=12)
    drawing.text(20, 164, "compute", anchor="start")
    drawing.text(20, 200, "copies", anchor="start")
    for place in range(6):
        is_forward = place < 3
        number = place if is_forward else 5 - place
        drawing.box(
            90 + 106 * place, 146, 102, 26, f"layers {2 * number}, {2 * number + 1}",
            fill=BLUE if is_forward else ORANGE, size=12,
        )  # fmt: skip
        if place in (1, 2):
            drawing.box(90 + 106 * place, 182, 76, 26, f"{2 * (place - 1)}, {2 * place - 1} out",
                        fill=GREEN, size=12)  # fmt: skip
        if place in (3, 4):
            drawing.box(
                116 + 106 * place,
                182,
                76,
                26,
                f"{8 - 2 * place}, {9 - 2 * place} back",
                fill=GREEN,
                size=12,
            )
    _legend(drawing, 226, idles=False)
    return drawing


DRAWINGS = (
    data_parallel, tensor_parallel, pipeline, virtual_pipeline, zero, recompute, context_parallel,
    expert_parallel, offload,
)  # fmt: skip


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in DRAWINGS:
        draw().save()


if __name__ == "__main__":
    main()
