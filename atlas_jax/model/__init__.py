"""The network: one forward of the trunk and one of the MTP head, shared by training, prefill and decode."""
