"""The page of what became of each family of models, docs/families.md.

    python -m docs.build.families_page --keep DIR [--beside DIR]

Writes what `python -m benchmarks families --keep DIR` found; with --beside it says how results of
commands that share no captures compare.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.runtime.families import LIMIT_S, MAPPINGS, Family, names_of, results_in

HEAD = """# Model families

Written by `python -m docs.build.families_page`; don't edit it. Families are
names in the mappings of transformers {transformers}. Of each a tiny model with random weights is
made, two layers at least and each kind of layer. A family that trains in one process is searched
and verified (`planner search`, `planner verify`: losses, gradients, parameters and buffers of three
steps in fp64 beside the user's unmodified module) at tp 2 x pp 2 and at dp 2, with torch {torch}.
The runs were made {days}. Audio and speech models are tried without SpecAugment, which
draws by NumPy, and without skipped layers (`layerdrop`). Multimodal models are trained on text
alone, where they can be.

Processes of a family share its captures and imports; all else is what the commands do. {compared}

| word | meaning |
|---|---|
| trains | two steps in one process, with a finite loss; shares are of these |
| works | the plan was made, and trains as one process does |
| refused | in one line, which says what of the model is why, and what to do |
| differs | the plan trains differently from one process |
| fails | an error that tells the user nothing |
| late | a command took over {limit} CPU seconds |
"""

KINDS = """
## Counts

| mapping | names | tried | train | work at {first} | at {second} | refused | differ | fail | late |
|---|---|---|---|---|---|---|---|---|---|
"""


def write_page(
    results: Sequence[Family],
    names: Mapping[str, Sequence[str]],
    page: Path,
    limit_s: int,
    typed: Sequence[Family],
) -> None:
    """Write the page; `names` are a mapping's families, of those tried or not, and `typed` results
    of commands that share nothing.
    """
    import torch
    import transformers

    days = sorted({each.day for each in results if each.day})
    span = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    first, second = layouts = ("tp2-pp2", "dp2")
    text = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        days=span,
        limit=limit_s,
        compared=compared(results, typed),
    )
    text += KINDS.format(first=first, second=second)
    for kind, all_names in names.items():
        tried = [each for each in results if each.kind == kind]
        trained = [each for each in tried if each.trains]
        numbers = [len(all_names), len(tried), len(trained)]
        numbers += [
            sum(each.outcome.get(label) == "works" for each in trained) for label in layouts
        ]
        numbers += [
            sum(each.whole == outcome for each in trained)
            for outcome in ("refused", "differs", "fails", "late")
        ]
        text += f"| {kind} | {' | '.join(map(str, numbers))} |\n"
    trained = [each for each in results if each.trains]
    working = [each for each in trained if each.whole == "works"]
    share = len(working) / max(1, len(trained))
    text += (
        f"\nOf {len(trained)} families that train in one process {len(working)} work at both "
        f"layouts ({share:.0%}).\n"
    )
    each_s = [each.all_cpu_s for each in working if each.all_cpu_s]
    text += "\n## CPU seconds\n\nOf all processes of a command, without the import of libraries. "
    text += f"All of a family takes {statistics.median(each_s or [0]):.0f} at the median, with the "
    text += "trial in one process.\n\n| command | median | most | of |\n|---|---|---|---|\n"
    for label in layouts:
        for command in ("search", "verify"):
            taken = {
                f"{each.family} ({each.kind})": each.cpu_s[label][command]
                for each in working
                if each.all_cpu_s and command in each.cpu_s.get(label, {})
            }
            if taken:
                most = max(taken, key=lambda family: taken[family])
                middle = statistics.median(taken.values())
                text += f"| {command}, {label} | {middle:.0f} | {taken[most]:.0f} | {most} |\n"
    text += "\nA search captures the model; the second finds the capture kept.\n"
    text += "\n## Those that do not work\n"
    others = [each for each in trained if each.whole not in ("works", "-")]
    text += told([(each, each.whole, each.why) for each in others])
    text += "\n## Those that do not train in one process\n\nAs their tiny configuration stands.\n"
    text += told([(each, "", each.why) for each in results if not each.trains])
    text += "\n## Those that work\n"
    for kind in names:
        found = sorted(each.family for each in working if each.kind == kind)
        if found:
            text += f"\n{kind}: {', '.join(found)}.\n"
    untried = {
        kind: sorted(set(all_names) - {each.family for each in results if each.kind == kind})
        for kind, all_names in names.items()
    }
    if any(untried.values()):
        text += "\n## Those not tried\n"
        for kind, left in untried.items():
            text += f"\n{kind}: {', '.join(left)}.\n" if left else ""
    page.write_text(text)


def compared(results: Sequence[Family], typed: Sequence[Family]) -> str:
    """Return how results are, beside those of commands that capture anew."""
    found = {(each.kind, each.family): each for each in results if each.all_cpu_s}
    both = [(found[place], each) for each in typed if (place := (each.kind, each.family)) in found]
    if not both:
        return "They were not compared with commands that capture anew."
    others = [b.family for a, b in both if (a.trains, a.outcome) != (b.trains, b.outcome)]
    text = (
        f"\n{len(both)} families were also tried by commands that share no captures "
        f"({', '.join(sorted(each.family for _, each in both))}): {len(both) - len(others)} came "
        "to the same"
    )
    return f"{text}, all but {', '.join(sorted(others))}." if others else f"{text}."


def told(rows: Sequence[tuple[Family, str, Mapping[str, str]]]) -> str:
    """Return a table of families and why, or a line where there are none."""
    if not rows:
        return "\nNone.\n"
    text = "\n| mapping | family | | why |\n|---|---|---|---|\n"
    for result, word, why in sorted(rows, key=lambda row: (row[0].kind, row[0].family)):
        said = "; ".join(dict.fromkeys(map(plain, why.values())))
        text += f"| {result.kind} | {result.family} | {word} | {said} |\n"
    return text


def plain(line: str) -> str:
    """Return a line without folders of the machine it was said on, as a cell of a table."""
    line = re.sub(r"/\S*/site-packages/", "", line)
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", line)
    return line.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def main() -> None:
    """Write the page of the results in a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, required=True, help="the folder of results")
    parser.add_argument("--beside", type=Path, help="a folder of results to compare")
    options = parser.parse_args()
    names = {kind: names_of(kind) for kind in MAPPINGS}
    typed = results_in(options.beside) if options.beside else []
    write_page(results_in(options.keep), names, ROOT / "docs" / "families.md", LIMIT_S, typed)


if __name__ == "__main__":
    main()
