"""What every folder uses: errors, options, settings, host identity, the C++ builder. Never imports torch."""
