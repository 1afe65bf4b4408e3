"""What every folder uses: errors, options, host identity, the C++ builder. Never torch."""
