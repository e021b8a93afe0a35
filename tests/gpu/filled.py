"""Trains (with the command's arguments) with little of the device's memory left: this process first takes all but about 600 MiB."""

import runpy

import torch

LEFT = 600 * 2**20

free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(free - LEFT, 0), dtype=torch.uint8, device="cuda")
runpy.run_module("samewise", run_name="__main__")
