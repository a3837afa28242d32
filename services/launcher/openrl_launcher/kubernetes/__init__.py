"""The launcher's Kubernetes backend (K1-K11): ResourceClaims, pods, inventory, watches, mirrors. See ``cluster``."""
