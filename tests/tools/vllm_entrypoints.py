"""`python -m tests.tools.vllm_entrypoints SDIST`: vLLM's own tests of its HTTP server, against ours.

SDIST is the unpacked source distribution of vllm from PyPI (its `tests/` is not in the wheel). The demo model
is served under any name; the tests that do not apply, and why, are in `docs/vllm-tests.md`. None of vLLM's
files is copied. More arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from app.demo_model import build_demo_model

PLUGIN = Path(__file__).parent
FILES = (
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_namespace_tool_separator.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_return_token_ids.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "anthropic/test_messages.py",
)
# What does not apply, by file; the reasons are in docs/vllm-tests.md.
NOT_APPLICABLE: dict[str, tuple[str, ...]] = {
    "openai/chat_completion/test_chat.py": (
        "test_more_than_one_prompt_logprobs_chat",
        "test_single_chat_session",
        "test_structured_outputs_json_chat",
        "test_structured_outputs_choice_chat",
        "test_structured_outputs_regex_chat",
        "test_response_format_json_object",
        "test_response_format_json_schema",
        "test_complex_message_content",
        "test_long_seed",
        "test_chat_completion_request_n_parameter_to_sampling_params",
        "test_chat_completion_request_n_parameter_default",
        "test_chat_completion_request_n_parameter_various_values",
        "test_chat_completion_request_n_parameter_exceeds_default_limit",
        "test_chat_completion_request_n_parameter_at_limit",
        "test_chat_completion_request_n_parameter_custom_limit",
        "test_chat_completion_request_n_parameter_massive_value",
        "test_chat_completion_request_accepts_model_specific_reasoning_effort",
        "test_chat_completion_request_rejects_unknown_reasoning_effort",
        "test_null_top_logprobs_is_same_as_omitted",
    ),
    "openai/chat_completion/test_chat_completion.py": (
        "test_kv_transfer_prompt_token_ids_round_trip",
        "test_kv_transfer_prompt_token_ids_streaming",
    ),
    "openai/chat_completion/test_chat_echo.py": (
        "test_prompt_logprobs",
        "test_top_logprobs",
    ),
    "openai/chat_completion/test_completion_with_function_calling.py": ("test_named_tool_use",),
    "openai/chat_completion/test_logprob_token_ids.py": (
        "test_chat_request_decouples_top_k_from_explicit_token_ids",
        "test_completion_request_decouples_top_k_from_explicit_token_ids",
        "test_completion_rejects_explicit_token_ids_without_generated_tokens",
        "test_requests_reject_explicit_token_ids_with_beam_search",
    ),
    "openai/completion/test_completion.py": (
        "test_single_completion",
        "test_completion_streaming",
        "test_parallel_no_streaming",
        "test_parallel_streaming",
        "test_batch_completions",
        "test_completion_request_bad_words_to_sampling_params",
        "test_completion_request_bad_words_default_empty",
        "test_completion_request_forwards_routed_experts_prompt_start",
    ),
    "openai/completion/test_prompt_validation.py": (
        "test_empty_prompt",
        "test_load_prompt_embeds",
        "test_disable_prompt_embeds",
    ),
    "openai/models/test_models.py": ("test_check_models",),
    "openai/responses/test_simple.py": ("test_enable_response_messages",),
    "openai/responses/test_stateful.py": (
        "test_background",
        "test_background_error",
        "test_background_cancel",
    ),
    "openai/test_return_token_ids.py": ("test_chat_completion_with_tool_use",),
    "openai/test_return_tokens_as_ids.py": ("test_responses_api_logprobs_with_return_tokens_as_token_ids",),
    "serve/tokenize/test_tokenization.py": ("test_tokenize_chat_with_tools",),
    "serve/instrumentator/test_basic.py": (
        "test_show_version",
        "test_request_cancellation",
        "test_health_check_engine_dead_error",
    ),
    "serve/instrumentator/test_metrics.py": ("test_metrics_exist_run_batch",),
    "anthropic/test_messages.py": (
        "test_anthropic_streaming",
        "test_anthropic_streaming_cache_usage",
    ),
}


def main() -> int:
    """Runs the tests; returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    arguments, more = parser.parse_known_args()
    folder = arguments.sdist.resolve() / "tests" / "entrypoints"
    chosen = [str(folder / name) for name in FILES]
    if any(not one.startswith("-") for one in more):
        chosen = [str(folder / one) for one in more if not one.startswith("-")]
        more = [one for one in more if one.startswith("-")]
    environment = {
        **os.environ,
        "MOEBIUS_TOKENIZER": str(build_demo_model()),
        "PYTHONPATH": str(PLUGIN),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "vllm_shim",
        "-p",
        "no:schemathesis",
        "--noconftest",
        "-c",
        os.devnull,
    ]
    command += ["--rootdir", str(arguments.sdist.resolve()), "-o", "asyncio_mode=auto", "-W", "ignore"]
    for file, names in NOT_APPLICABLE.items():
        for name in names:
            command += ["--deselect", f"tests/entrypoints/{file}::{name}"]
    return subprocess.run([*command, *chosen, *more], env=environment, cwd=arguments.sdist).returncode


if __name__ == "__main__":
    sys.exit(main())
