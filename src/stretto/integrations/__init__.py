"""Stretto's parts inside other people's systems: optional stacks are imported only where they are used."""
