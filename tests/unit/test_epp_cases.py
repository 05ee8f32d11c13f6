"""What llm-d's picker and GAIE's reference one decide, decided by ours in memory."""

import dataclasses
import json

import pytest

from gateway.extproc.types import Pick
from tests.support.epp_cases import CASES, Case
from tests.support.epp_world import Pool


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_case(case: Case) -> None:
    async with Pool(*case.pods, epp=case.epp) as pool:
        asked = case.request
        if case.among is not None:
            among = tuple(each if isinstance(each, str) else pool.endpoint(each) for each in case.among)
            asked = dataclasses.replace(asked, subset=among)
        verdict = await pool.pick(asked)
        if case.route is None:
            await pool.expect_refusal(asked, case.status, case.dropped)
            assert pool.is_idle()
            return
        assert isinstance(verdict, Pick), verdict
        assert verdict.endpoints[0] in {pool.endpoint(pod) for pod in case.routes}
        assert len(verdict.endpoints) == 1
        if case.model is None:
            assert verdict.body is None
        else:
            assert verdict.body is not None
            assert json.loads(verdict.body) == {**json.loads(asked.body), "model": case.model}
            assert verdict.rename == (case.model, json.loads(asked.body)["model"])
        verdict.watch.aborted()
        assert pool.is_idle()
