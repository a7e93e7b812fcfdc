"""A pod that asks for a bitstream: what a person would type after reading three pages.

The text is YAML, for people. Nothing in it is foreign text: ids are digits, and the accelerator's
title goes into no value.
"""

from fpga_plugin.bitstreams.contents import Contents
from fpga_plugin.errors import quote
from fpga_plugin.ids import Resource, ResourceKind


def pod_manifest(contents: Contents, *, prefix: str, image: str) -> str:
    """A manifest of a pod whose one container starts with the bitstream in a region.

    Args:
        contents: of the bitstream's file.
        prefix: of the resources of the cards that it is for.
        image: the container's.
    """
    resource = Resource(prefix, ResourceKind.REGION, contents.interface_id)
    place = f"{contents.interface_id}/{contents.bitstream_id}.{contents.kind.ending}"
    return f"""\
# {quote(contents.name)}, in the store {place}
apiVersion: v1
kind: Pod
metadata:
  name: fpga-{contents.bitstream_id[:8]}
spec:
  restartPolicy: Never
  containers:
  - name: app
    image: {image}   # the program that uses the accelerator; its device node is $FPGA_DEVICE_1
    resources:
      limits:
        {resource.name}: 1
    env:
    - {{name: FPGA_REGION_1, value: "{contents.interface_id}"}}
    - {{name: FPGA_BITSTREAM_ID_1, value: "{contents.bitstream_id}"}}
"""
