"""Measuring: speeds beside a plain control that must emit the same tokens, and the prompts they are measured on."""
