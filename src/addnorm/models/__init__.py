"""Where a Config becomes a network, is counted, saved and loaded."""
