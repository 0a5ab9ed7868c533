"""`python -m fusepass` and `python -m bench`: what can be told without compiling a model."""

import json
import sys
from pathlib import Path

import pytest
import torch

import fusepass.__main__ as cli
from bench import __main__ as bench
from bench import suite, timing
from bench.__main__ import main as bench_main
from bench.suite import Options, Table
from fusepass import environment

FACTORY = """
import torch

def make():
    return lambda x, r: torch.nn.functional.layer_norm(x + r, (8,)), [torch.ones(4, 8), torch.ones(4, 8)]
"""


def test_env_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for fact in ("fusepass", "python", f"torch         {torch.__version__}", "triton", "CPU", "C++ compiler", "GPU"):
        assert fact in out


def test_explain_prints_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_model.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["explain", "some_model:make", "--json", str(tmp_path / "report.json")]) == 0
    assert "layer_norm" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["fused"] == 1


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("bench.models", "expected MODULE:CALLABLE, got 'bench.models'"),
        ("bench.models:none_such", "no 'bench.models:none_such'"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("fusepass.environment:describe", "expected fusepass.environment:describe to return (model, args), got dict"),
    ],
)
def test_explain_says_what_is_wrong_with_a_factory(
    factory: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", factory]) == 2
    assert message in capsys.readouterr().err


def test_demo_says_that_it_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "bench.models", raising=False)
    monkeypatch.setitem(sys.modules, "bench", None)
    assert cli.main(["demo"]) == 2
    assert "run it in a checkout" in capsys.readouterr().err


def test_demo_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert cli.main(["demo"]) == 2
    assert "needs g++ or clang++" in capsys.readouterr().err


def test_the_compiler_is_the_one_of_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-compiler"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert environment.find_compiler() == str(compiler)


def test_bench_refuses_a_suite_or_thread_count_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["no-such-suite"], ["kernels", "--threads", "0"], ["kernels", "--threads", "two"]):
        with pytest.raises(SystemExit):
            bench_main(arguments)
        assert "usage: python -m bench" in capsys.readouterr().err


def test_table_as_text_json_and_markdown(tmp_path: Path) -> None:
    table = Table("kernels", [{"norm": "rms_norm", "copy_us": 12.3456}], ["one line"], {"torch": "2.x"}, "2026-01-01")
    assert table.text().splitlines()[:2] == ["torch: 2.x", "date: 2026-01-01"]
    assert "12.35" in table.text()
    suite.write_json([table], tmp_path / "t.json")
    one = json.loads((tmp_path / "t.json").read_text())
    rows = [{"norm": "rms_norm", "copy_us": 12.3456}]
    assert (one["suite"], one["rows"], one["summary"]) == ("kernels", rows, ["one line"])
    other = Table("audit", [{"kernel": "k"}], ["another"], {"torch": "2.x"}, "2026-01-01")
    suite.write_json([table, other], tmp_path / "new" / "t.json", several=True)
    several = json.loads((tmp_path / "new" / "t.json").read_text())
    assert several["environment"] == one["environment"] == {"torch": "2.x"}
    assert several["suites"] == {
        "kernels": {"rows": rows, "summary": ["one line"]},
        "audit": {"rows": [{"kernel": "k"}], "summary": ["another"]},
    }
    suite.write_markdown([table, other], tmp_path / "t.md")
    written = (tmp_path / "t.md").read_text()
    assert "| rms_norm |     12.35 |" in written and written.index("## kernels") < written.index("## audit")


def test_interleaving_takes_every_measure_once_a_round() -> None:
    order: list[str] = []

    def measure(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    measures = {"a": lambda: measure("a", 1.0), "b": lambda: measure("b", 2.0)}
    samples = timing.interleave(measures, rounds=6, warmup=1)
    assert all({*order[i : i + 2]} == {"a", "b"} for i in range(0, 14, 2)) and len(order) == 14
    assert samples["a"].seconds == (1.0,) * 6 and samples["b"].median == 2.0 and samples["b"].spread == 0


def test_spread_is_the_distance_of_the_quartiles() -> None:
    assert timing.Sample((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)).spread == pytest.approx(4 / 4)


def test_a_group_goes_on_after_a_suite_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Options] = {}

    def run(options: Options) -> Table:
        given["second"] = options
        return Table("second", [{"a": 1}], ["done"], {"torch": "2.x"}, "2026-01-01")

    def fail(options: Options) -> Table:
        given["first"] = options
        raise RuntimeError("out of luck")

    monkeypatch.setattr(bench, "SUITES", {"first": fail, "second": run})
    monkeypatch.setattr(bench, "GROUPS", {"both": bench.Group("", {"first": 5.0, "second": None}, max_autotune=False)})
    monkeypatch.setattr(environment, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(bench, "_today", lambda: "2026-01-02")
    figure = tmp_path / "f.png"
    assert bench_main(["both", "--device", "cuda", "--results", str(tmp_path), "--plot", str(figure)]) == 1
    captured = capsys.readouterr()
    assert "first failed:" in captured.err and "RuntimeError: out of luck" in captured.err
    assert "done" in captured.out
    assert given["first"] == Options("cuda", plot=tmp_path / "f-first.png", seconds=5.0, max_autotune=False)
    assert given["second"] == Options("cuda", plot=tmp_path / "f-second.png", max_autotune=False)
    result = json.loads((tmp_path / "nvidia-h200-2026-01-02.json").read_text())
    assert result["suites"] == {"second": {"rows": [{"a": 1}], "summary": ["done"]}}
    assert "## second" in (tmp_path / "nvidia-h200-2026-01-02.md").read_text()


def test_the_groups_are_of_suites() -> None:
    assert set(bench.GROUPS["all"].suites) == set(bench.SUITES) == set(bench.MEANINGS)
    assert set(bench.GROUPS["gpu"].suites) <= set(bench.SUITES)
    assert sum(s or 0 for s in bench.GROUPS["gpu"].suites.values()) < 6 * 60


def test_a_suite_in_which_fusepass_failed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for failed in (False, True):
        monkeypatch.setitem(bench.SUITES, "audit", lambda _, failed=failed: Table("audit", [{"a": 1}], failed=failed))
        assert bench_main(["audit"]) == failed


def test_a_device_as_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpu_name", lambda: "AMD EPYC 9B14 (Genoa)")
    monkeypatch.setattr(environment, "gpu_name", lambda: None)
    assert [environment.slug(d) for d in ("cpu", "cuda")] == ["amd-epyc-9b14-genoa", "cuda"]
