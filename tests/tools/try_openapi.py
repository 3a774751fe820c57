"""`python -m tests.tools.try_openapi`: many requests drawn from the OpenAPI document by schemathesis.

Prints per operation how many were answered with which status; exit status 1 when one was answered with 500 or
above, or as the document does not say.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import structlog

from tests.helpers.openapi_cases import described_gateway, operations, try_operation


def main() -> int:
    """Runs all operations; those without parameters take one request each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="requests in all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    failed = total = 0
    with tempfile.TemporaryDirectory() as directory, described_gateway(Path(directory)) as (url, schema):
        listed = operations(schema)
        varied = sum(bool(one.body or one.path_parameters) for one in listed)
        for operation in listed:
            try:
                statuses = try_operation(operation, url, -(-arguments.cases // varied), arguments.seed)
            except Exception as error:
                failed += 1
                print(f"FAILED {operation.label}: {error}", flush=True)
                continue
            total += statuses.total()
            print(f"{operation.label}: {dict(sorted(statuses.items()))}", flush=True)
    print(f"{total} requests answered as the document says; {failed} operations were not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
