import contextlib

from hypothesis import given
from hypothesis import strategies as st

from edge_server.config import ConfigError, parse_serve
from edge_server.config.server_config import DeclaredSettings
from edge_server.plugin import own_plugins

texts = st.text(max_size=40)
PLUGINS = own_plugins()
SETTINGS = DeclaredSettings(PLUGINS).settings
flags = st.sampled_from([setting.flag for setting in SETTINGS])


@given(flag=flags, text=texts)
def test_any_text_for_any_flag_is_a_value_or_a_config_error(flag, text):
    with contextlib.suppress(ConfigError):
        parse_serve(["--model-repository=/m", f"{flag}={text}"], {}, PLUGINS)


@given(argv=st.lists(st.one_of(flags, texts), max_size=6))
def test_any_command_line_is_understood_or_a_config_error(argv):
    with contextlib.suppress(ConfigError):
        parse_serve([argument for argument in argv if not argument.startswith("--config")], {}, PLUGINS)


@given(setting=st.sampled_from(SETTINGS), text=texts)
def test_any_text_for_any_variable_is_a_value_or_a_config_error(setting, text):
    with contextlib.suppress(ConfigError):
        parse_serve(["--model-repository=/m"], {setting.variable: text}, PLUGINS)
