"""The scripted model: what it answers, and which mistakes of others it notices."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from driver import Driver

from sglite.runtime.model.faults import FaultyModel, fail_at, fail_on_token
from sglite.runtime.model.scripted import FLOOR, UNWRITTEN, ScriptedModel

VOCAB = 37
TEXTS = [[5, 9, 2, 2, 36, 0, 1], [5, 9, 2], [7]]
WHOLE = {slot: len(ids) for slot, ids in enumerate(TEXTS)}


def last_logits(texts, page_size=4, model=None):
    driver = Driver(model or ScriptedModel(VOCAB), texts, page_size)
    return driver.step({slot: len(ids) for slot, ids in enumerate(texts)}, wanted=1)


def next_token(history):
    """The sum of the history: every token counts."""
    return sum(history) % VOCAB


# ------------------------------------------------------------------------------------------------------------- answers


def test_a_script_sees_exactly_the_history_of_each_wanted_position():
    seen = []
    model = ScriptedModel(VOCAB, lambda history: seen.append(history) or 0)
    Driver(model, TEXTS, 2).step(WHOLE)
    assert seen == [ids[: n + 1] for ids in TEXTS for n in range(len(ids))]


def test_an_integer_is_all_but_certain():
    logits = last_logits(TEXTS, model=ScriptedModel(VOCAB, next_token))
    assert logits.argmax(-1).tolist() == [next_token(ids) for ids in TEXTS]
    assert bool((logits.softmax(-1).amax(-1) > 0.999999).all())
    assert bool(torch.isfinite(logits).all())


def test_a_mapping_names_logits_and_the_rest_stay_at_the_floor():
    logits = last_logits([[1, 2]], model=ScriptedModel(VOCAB, lambda _: {3: 0.5, 8: -1.0}))[0]
    assert logits[[3, 8]].tolist() == [0.5, -1.0]
    assert sorted(logits.tolist())[:-2] == [FLOOR] * (VOCAB - 2)


def test_a_tensor_is_taken_as_it_is():
    answer = torch.arange(VOCAB).float()
    assert torch.equal(last_logits([[1]], model=ScriptedModel(VOCAB, lambda _: answer))[0], answer)


def test_a_script_can_give_nan_to_one_row():
    model = ScriptedModel(VOCAB, lambda history: {0: math.nan} if len(history) == 3 else 0)
    assert last_logits(TEXTS, model=model).isnan().any(-1).tolist() == [False, True, False]


def test_no_wanted_position_no_answer():
    assert Driver(ScriptedModel(VOCAB), TEXTS, 4).step(WHOLE, wanted=0).shape == (0, VOCAB)
    assert Driver(ScriptedModel(VOCAB, next_token), TEXTS, 4).step(WHOLE, wanted=0).shape == (0, VOCAB)


# ------------------------------------------------------------------------------------------------------ default script


def test_the_default_depends_on_every_token_and_its_place():
    histories = [[1, 2, 3], [0, 2, 3], [1, 0, 3], [1, 2, 0], [2, 1, 3], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3]]
    distinct = {tuple(row) for row in last_logits(histories).tolist()}
    assert len(distinct) == len(histories)


def test_the_default_is_spread_and_finite():
    logits = last_logits([[n] for n in range(VOCAB)])
    assert -8 <= logits.min() < -7 and 7 < logits.max() < 8
    assert len(set(logits.argmax(-1).tolist())) > VOCAB / 3


@pytest.mark.parametrize("script", [None, next_token], ids=["hash", "sum"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_answers_depend_on_nothing_but_the_history(script, page_size):
    model = ScriptedModel(VOCAB, script)
    together = Driver(model, TEXTS, page_size, room=9).greedy(9)
    assert together == [Driver(model, [ids], 4, room=9).greedy(9)[0] for ids in TEXTS]
    chunked = Driver(model, [TEXTS[0] + together[0]], page_size)
    first, rest = chunked.step({0: 9}), chunked.step({0: 7})
    assert torch.cat([first, rest]).argmax(-1).tolist()[6:-1] == together[0]


# ------------------------------------------------------------------------------------------------------------- mistakes


def ready() -> tuple[Driver, object]:
    """Two sequences with four tokens in the pool each, and the batch of their fifth."""
    driver = Driver(ScriptedModel(VOCAB), [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], 2)
    driver.step({0: 4, 1: 4})
    return driver, driver.batch({0: 1, 1: 1}, wanted=1)


def test_another_page_in_the_table_changes_the_answer():
    driver, batch = ready()
    right = driver.model.forward(batch, driver.kv)
    table = batch.page_table.clone()
    table[0, 0] = table[1, 0]
    wrong = driver.model.forward(replace(batch, page_table=table), driver.kv)
    differs = (driver.model.logits(right) != driver.model.logits(wrong)).any(-1)
    assert differs.tolist() == [True, False]


def test_a_position_that_was_never_written_is_noticed():
    driver, batch = ready()
    first_page = int(batch.page_table[1, 0])
    driver.kv.ids[first_page, 0] = UNWRITTEN
    with pytest.raises(AssertionError, match="never written"):
        driver.model.forward(batch, driver.kv)


def test_parts_of_a_batch_that_disagree_are_noticed():
    driver, batch = ready()
    broken = {
        "vocabulary": replace(batch, ids=batch.ids + VOCAB),
        "positions": replace(batch, positions=batch.positions - 1),
        "write_slots": replace(batch, write_slots=batch.write_slots.flip(0)),
        "one slot": replace(
            batch,
            write_slots=batch.write_slots[:1].expand(2),
            page_table=batch.page_table[:1].expand(2, -1),
        ),
    }
    for said, wrong in broken.items():
        with pytest.raises(AssertionError, match=said):
            driver.model.forward(wrong, driver.kv)


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_step_can_fail_by_number_and_the_next_goes_on():
    model = FaultyModel(ScriptedModel(VOCAB, next_token), fail_at(1, RuntimeError("lost")))
    driver = Driver(model, [[1, 2, 3, 4]], 4)
    driver.step({0: 2})
    batch = driver.batch({0: 2}, wanted=1)
    with pytest.raises(RuntimeError, match="lost"):
        model.forward(batch, driver.kv)
    assert model.logits(model.forward(batch, driver.kv)).argmax(-1).tolist() == [10]
    assert model.steps == 3


def test_a_token_can_poison_every_batch_it_is_in():
    model = FaultyModel(ScriptedModel(VOCAB), fail_on_token(36, RuntimeError("lost")))
    driver = Driver(model, TEXTS, 4)
    driver.step({1: 3, 2: 1})
    with pytest.raises(RuntimeError, match="lost"):
        driver.step({0: 7})


# --------------------------------------------------------------------------------------------------------------- speed


def test_a_step_of_64_rows_takes_well_under_two_milliseconds():
    driver = Driver(ScriptedModel(300, lambda history: history[-1]), [[n] * 200 for n in range(64)], 16, room=40)
    driver.step(dict.fromkeys(range(64), 160), wanted=1)
    times = []
    for _ in range(40):
        batch = driver.batch(dict.fromkeys(range(64), 1), wanted=1)
        start = time.perf_counter()
        driver.model.logits(driver.model.forward(batch, driver.kv))
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3
