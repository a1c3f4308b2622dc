"""Why a server falls short: every hypothesis replayed and held against what it did."""
