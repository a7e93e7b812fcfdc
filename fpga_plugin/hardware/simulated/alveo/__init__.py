"""Simulated Alveo cards: a kernel below the XRT code, as AMD's drivers were seen to behave.

Seen with the unmodified drivers of XRT 2.25.0 on a fake card in a virtual machine; each trait is
named where it is played. What no fake card shows there (transfers, so on-card memory; sensors;
firewalls) follows the drivers' source.
"""
