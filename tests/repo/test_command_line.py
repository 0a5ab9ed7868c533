"""`python -m fusepass` and `python -m bench`: what can be told without compiling a model."""

import json
import sys
from pathlib import Path

import pytest
import torch

import fusepass.__main__ as cli
from bench import timing
from bench.__main__ import main as bench_main
from bench.suite import Table
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
    table.write_json(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["rows"] == [{"norm": "rms_norm", "copy_us": 12.3456}]
    table.write_markdown(tmp_path / "t.md")
    assert "| rms_norm |     12.35 |" in (tmp_path / "t.md").read_text()


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
