"""Names of settings in messages to users."""

import pytest

from coordinator.config.settings import CoordinatorSettings
from specpool.cli.generate_settings import GenerateSettings
from specpool.rpc.config.help import with_flags


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_num_seqs must not exceed queue_size", "--max-num-seqs must not exceed --queue-size"),
        ("tls_ca: must be given with tls_cert", "tls-ca: must be given with --tls-cert"),
        ("max_num_speculative_tokens (num_speculative_tokens)",
         "--max-num-speculative-tokens (--num-speculative-tokens)"),
        ("use the port of the host", "use the port of the host"),
        ('tls_key: /tls_key/a, "tls_key", tls_key.pem', 'tls-key: /tls_key/a, "tls_key", tls_key.pem'),
        ("my_tls_key", "my_tls_key"),
    ],
)  # fmt: skip
def test_messages_name_flags(message: str, shown: str) -> None:
    assert with_flags(CoordinatorSettings, message) == shown


def test_flags_have_the_names_that_users_type() -> None:
    assert with_flags(GenerateSettings, "json_schema and json_lines") == "--json-schema and json_lines"
