"""The pure heart of Rolltape: facts, their fold, estimators and datums. No I/O, clock, random or async."""
