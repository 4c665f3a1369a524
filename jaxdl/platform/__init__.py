"""Many runs on many machines: launchers, job files, searches, fleets, Spark."""
