"""A pytest plugin: hypothesis neither shrinks nor remembers a failure. A mutant's tests only have to fail."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    phases=[Phase.explicit, Phase.generate],
    database=None,
    print_blob=False,
    deadline=None,  # a busy machine would kill mutants
)
settings.load_profile("mutants")
