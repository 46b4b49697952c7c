"""Learning: advantages, losses, off-policy corrections, and the learner that makes optimiser steps."""
