"""Ledgers beside other libraries. Each module needs its library and is imported by name: `integrations.opacus`."""
