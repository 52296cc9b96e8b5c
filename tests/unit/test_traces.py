"""Traces and plants from files: small stand-ins in each format, made here."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from weir_operator.simulate import plants
from weir_operator.simulate.load import PART_TOKENS, Arrival
from weir_operator.simulate.traces import Shape, TraceError, rates, read, with_rate
from weir_server.contract import Plant


def test_azure_times_count_from_the_first_row(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    rows = read(file, Shape())
    assert [(round(r.at, 3), r.prompt, r.output) for r in rows] == [(0.0, 374, 44), (4.315, 396, 109)]
    assert read(file, Shape(seconds=4.0)) == rows[:1]
    faster = read(file, Shape(speed=2.0, prompt_by=16, output_by=8, output_cap=10))
    assert [(round(r.at, 3), r.prompt, r.output) for r in faster] == [(0.0, 23, 6), (2.157, 25, 10)]


def test_vidur_and_plain_heads_are_read_too(tmp_path):
    for head in ("arrived_at,num_prefill_tokens,num_decode_tokens", "timestamp,input_length,output_length"):
        file = tmp_path / "t.csv"
        file.write_text(f"{head}\n10.5,20,3\n11.5,30,4\n")
        assert read(file, Shape()) == [Arrival(0.0, 20, 3), Arrival(1.0, 30, 4)]


def test_mooncake_names_the_content_of_its_prompts(tmp_path):
    file = tmp_path / "m.jsonl"
    lines = [{"timestamp": 3000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
             {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 3]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read(file, Shape())
    assert 0.0 <= second.at - first.at <= 3.0
    assert first.tokens()[: 2 * PART_TOKENS] == second.tokens()[: 2 * PART_TOKENS] and len(second.tokens()) == 1200
    assert first.tokens()[2 * PART_TOKENS] != second.tokens()[2 * PART_TOKENS]


def test_times_that_are_rounded_are_no_batches(tmp_path):
    """Thirty rows at each multiple of three seconds: within a gap they lie anywhere, and none leaves its own."""
    file = tmp_path / "m.jsonl"
    file.write_text("".join(
        json.dumps({"timestamp": 3000 * (i // 30), "input_length": i + 1, "output_length": 5}) + "\n" for i in range(120)
    ))
    rows = read(file, Shape(), seed=1)
    zero = 3.0 * 3 - rows[90].at  # the last ones stay at 9 s, and the first row is the start
    times = [r.at + zero for r in rows]
    assert times == sorted(times) and len(set(times[:90])) == 90
    assert [sum(3 * k <= t < 3 * k + 3 for t in times) for k in range(4)] == [30] * 4
    assert sum(t % 3 < 1.5 for t in times[:90]) == pytest.approx(45, abs=15)
    assert rows == read(file, Shape(), seed=1) != read(file, Shape(), seed=2)


def servegen(tmp_path, family="Gamma", shape=1.0, rate=2.0, scale=0.5):
    trace = tmp_path / "pool_chunk-1-trace.csv"
    trace.write_text(f"0,{rate},1.0,{family},{shape},{scale}\n600,0,0,,0,0\n1200,{rate},1.0,{family},{shape},{scale}\n")
    lengths = {"0": {"input_tokens": "{}", "output_tokens": "{}"},
               "600": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{8: 1.0}"}}
    (tmp_path / "pool_chunk-1-dataset.json").write_text(json.dumps(lengths))
    return trace


@pytest.mark.parametrize(("family", "shape", "scale"), [("Gamma", 0.5, 1.0), ("Weibull", 1.0, 0.5)])
def test_servegen_is_a_generator_with_the_rate_and_the_lengths_that_it_states(tmp_path, family, shape, scale):
    rows = read(servegen(tmp_path, family, shape, scale=scale), Shape(), seed=3)
    assert len(rows) == pytest.approx(2400, rel=0.1)
    assert not [r for r in rows if 605 < r.at < 1195], "a window without a rate has no rows"
    assert statistics.fmean(r.prompt for r in rows) == pytest.approx(200, rel=0.05) and {r.output for r in rows} == {8}
    again = servegen(tmp_path, family, shape, scale=scale)
    assert rows == read(again, Shape(), seed=3) != read(again, Shape(), seed=4)


def test_the_rates_of_a_pool_are_those_of_its_clients_together(tmp_path):
    one, two = tmp_path / "a-trace.csv", tmp_path / "b-trace.csv"
    one.write_text("0,2.0,1,Gamma,1,1\n600,3.0,1,Gamma,1,1\n")
    two.write_text("0,0.5,1,Gamma,1,1\n")
    assert rates([one, two]) == [2.5, 3.0]
    two.write_text("0\n")
    with pytest.raises(TraceError, match="b-trace"):
        rates([two])


def test_a_rate_stretches_time_and_keeps_the_order():
    rows = [Arrival(float(i), 1, 1) for i in range(101)]
    faster = with_rate(rows, 2.0, 1000.0)
    assert len(faster) == 101 and faster[-1].at == pytest.approx(50.5)
    assert len(with_rate(rows, 2.0, 20.0)) == 40


def test_no_row_is_longer_than_the_context(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("timestamp,input_length,output_length\n0,5000,900\n1,0,0\n")
    rows = read(file, Shape(context=1024))
    assert all(r.prompt >= 1 and r.output >= 1 and r.prompt + r.output < 1024 for r in rows)


@pytest.mark.parametrize(("name", "text", "says"), [
    ("a.csv", "when,how\n1,2\n", "neither"),
    ("a.csv", "timestamp,input_length,output_length\n0,5\n", "a.csv:2"),
    ("a.csv", "timestamp,input_length,output_length\n", "no rows"),
    ("a.jsonl", '{"timestamp": 1}\n', "a.jsonl:1"),
    ("a.jsonl", '{"timestamp": 1, "input_length": 1, "output_length": 1}\n{]\n', "a.jsonl:2"),
    ("b-trace.csv", "0,1.0,1.0,Gamma,1.0,1.0\n", "b-dataset.json"),
])
def test_a_file_that_is_no_trace_is_one_sentence(tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(TraceError, match=says):
        read(file, Shape())


# ---------------------------------------------------------------- plants

HEAD = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,tensor_parallel\n"
TRUTH = Plant(0.030, 0.0002, 2e-7, 1e-4, 512)


def table(whole: bool, machines=("m,h,8",)) -> str:
    rng, lines = random.Random(1), []
    for machine in machines:
        model, hardware, tp = machine.split(",")
        for prompt in (128, 512, 2048):
            for batch in (1, 4, 16, 64):
                token = TRUTH.a + TRUTH.b * batch + TRUTH.c * batch * (prompt + 64)
                prefill = 0.01 + TRUTH.p * batch * prompt
                token *= rng.uniform(0.999, 1.001)
                unit, shown = (1.0, token * 128) if whole else (1000.0, token * 1000)
                e2e = (prefill + 128 * token) * unit
                lines.append(f"{model},{hardware},{prompt},{batch},128,{prefill * unit},{shown},{e2e},{tp}\n")
    return HEAD + "".join(lines)


@pytest.mark.parametrize("whole", [False, True])
def test_a_table_of_measurements_is_fitted_whatever_its_unit(tmp_path, whole):
    """Milliseconds for one token, or seconds for all of them."""
    file = tmp_path / "perf.csv"
    file.write_text(table(whole))
    found = plants.from_file(file, 512)
    assert found.step_seconds(16, 16 * 600, 0) == pytest.approx(TRUTH.step_seconds(16, 16 * 600, 0), rel=0.02)
    assert found.p == pytest.approx(TRUTH.p, rel=0.02)


def test_a_table_of_several_machines_asks_which(tmp_path):
    file = tmp_path / "perf.csv"
    file.write_text(table(False, ("m,h,8", "n,h,4")))
    with pytest.raises(plants.PlantError, match="n,h,4"):
        plants.from_file(file, 512)
    assert plants.from_file(file, 512, "n,h,4").a > 0
    with pytest.raises(plants.PlantError, match="no 'x'"):
        plants.from_file(file, 512, "x")


def test_a_plant_from_json_from_a_state_and_from_nonsense(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"a": 0.04, "b": 0.003, "c": 0.0, "p": 0.002}))
    assert plants.from_file(file, 64) == Plant(0.04, 0.003, 0.0, 0.002, 64)
    file.write_text(json.dumps({"plant": {"a": 1.0, "b": 0.0, "c": 0.0, "p": 0.0, "prefill_tokens": 7}, "model": {}}))
    assert plants.from_file(file, 64).prefill_tokens == 7
    for text in ("[]", '{"a": 1}', "{", "7"):
        file.write_text(text)
        with pytest.raises(plants.PlantError):
            plants.from_file(file, 64)


def test_what_a_server_did_is_regressed():
    from weir_operator.simulate.load import Phase, arrivals
    from weir_operator.simulate.pod import Pod
    from weir_operator.simulate.port import PodSetup
    from weir_server.contract import Slo

    truth = Plant(0.042, 0.0032, 1e-6, 0.002, 64)
    pod = Pod(PodSetup(truth, Slo(2.0, 0.1), noise=0.02))
    pod.inbox.extend(arrivals([Phase(120, 1.0, 128, 64)], 1, 8192))
    seen = []
    for i in range(25):
        pod.run(5.0 * i)
        seen.append(pod.window())
    found = plants.regressed(seen, None)
    for load in ((1, 200, 0), (4, 800, 0), (4, 800, 64)):
        assert found.step_seconds(*load) == pytest.approx(truth.step_seconds(*load), rel=0.05)
    with pytest.raises(plants.PlantError, match="too few"):
        plants.regressed(seen[:1], None)
