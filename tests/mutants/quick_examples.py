"""A pytest plugin: hypothesis neither shrinks nor remembers a failure. A mutant's tests only have to fail."""

from hypothesis import Phase, settings


def pytest_configure() -> None:
    """After tests/conftest.py, whose profile this takes the place of."""
    settings.register_profile(
        "mutants",
        settings.get_profile("baton"),
        phases=[Phase.explicit, Phase.generate],
        database=None,
        print_blob=False,
    )
    settings.load_profile("mutants")
