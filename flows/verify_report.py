"""What `tokenmill verify` found, as a table for people and as JSON for machines."""

import math
from dataclasses import asdict

from flows.answer_comparison import Difference
from flows.cli_options import print_json
from flows.console import print_table, talk
from flows.verify import VerifyReport


def show_report(report: VerifyReport, *, is_json: bool) -> None:
    """Print each difference, and what it comes to."""
    if is_json:
        _print_as_json(report)
        return
    if report.differences:
        print_table(
            "Differences",
            ("row", "sample", "turn", "token", "stored", "now", "margin", "what"),
            (_cells(difference, report) for difference in report.differences),
        )
    for row_id, reason in report.unverified:
        talk.print(f"not verified: {row_id}: {reason}")
    verdict = "passed" if report.has_passed else "failed"
    talk.print(
        f"{verdict}: {report.num_verified} of {report.num_ok_rows} ok rows were run again "
        f"(seed {report.seed}), {report.num_differing} differ ({report.share:.2%}, tolerated "
        f"{report.tolerance:.2%}), {len(report.unverified)} could not be verified",
    )


def _cells(difference: Difference, report: VerifyReport) -> tuple[object, ...]:
    margin = difference.margin
    return (
        difference.row_id,
        difference.sample_index,
        difference.turn_index,
        difference.token_index,
        _token(difference.stored_token, report),
        _token(difference.new_token, report),
        None if margin is None else f"{margin:.4f}",
        difference.what,
    )


def _token(token_id: int | None, report: VerifyReport) -> str:
    return "" if token_id is None else f"{token_id} {report.texts_of_tokens[token_id]!r}"


def _print_as_json(report: VerifyReport) -> None:
    facts = asdict(report) | {
        "num_differing": report.num_differing,
        "share": report.share,
        "has_passed": report.has_passed,
        "unverified": [{"row_id": name, "reason": why} for name, why in report.unverified],
    }
    for difference in facts["differences"]:
        margin = difference["margin"]
        if margin is not None and not math.isfinite(margin):
            difference["margin"] = None
    print_json(facts)
