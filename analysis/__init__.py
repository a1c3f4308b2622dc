"""Tables, statistics and reports over rounds; runs without torch."""
