"""What each region of a call is to become: requests given to regions, and their bitstreams read."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from fpga_plugin.allocation.names import MAY_COME_BACK, card_of
from fpga_plugin.allocation.recorder import EventRecorder
from fpga_plugin.allocation.requests.functions import assign_functions
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.allocation.requests.parse import (
    FpgaRequest,
    NamedBitstream,
    Target,
    assign,
    check_limits,
    no_such_name,
    parse_requests,
)
from fpga_plugin.allocation.requests.unknown_variables import unknown_variables
from fpga_plugin.bitstreams.manifest import Aliases
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.clocks import check_asked
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.prepare import FunctionTarget, ProgramTarget
from fpga_plugin.cards.reads import CardReads
from fpga_plugin.errors import (
    CardGoneError,
    FpgaPluginError,
    InvalidRequestError,
)
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import AfuId, BitstreamId, DeviceId, InterfaceId, RegionId, known_resource
from fpga_plugin.kubernetes.names import ResourceName
from fpga_plugin.settings.values import UnknownVariables

log = structlog.get_logger()

_MAX_AT_ONCE = 1000
"""Variables that are parsed within some milliseconds."""


class Targets:
    """Turns requests into what each region is to become, with the bitstream read.

    Args:
        operations: has the ledger and the backend.
        store: where bitstreams come from.
        reads: of cards that may not answer.
        recorder: is notified of variables that mean nothing.
        unknown: what is done about those.
    """

    def __init__(
        self,
        operations: CardOperations,
        store: StoreReader,
        reads: CardReads,
        *,
        recorder: EventRecorder,
        unknown: UnknownVariables = UnknownVariables.WARN,
    ) -> None:
        self._recorder = recorder
        self._unknown = unknown
        self._ledger = operations.ledger
        self._backend = operations.backend
        self._store = store
        self._reads = reads

    def named(self, error: FpgaPluginError) -> FpgaPluginError:
        """The same error for people: with what the store's manifest calls the ids in it.

        By the names that were read last: the call's time may be up, and no store is waited for.
        """
        return self._store.known_names.error(error)

    async def requests(
        self, identity: Identity, devices: Sequence[DeviceId], env: Mapping[str, str]
    ) -> tuple[FpgaRequest, ...]:
        """What a container asks for, by ids; says which of its FPGA_* variables mean nothing.

        What a bitstream is called is looked up here, once a call: the policy is asked about the
        same bitstream that is programmed.

        Raises:
            InvalidRequestError: a request is wrong, or a variable means nothing and none such may
                be there.
            FpgaPluginError: the manifest, which says what bitstreams are called, cannot be read.
        """
        # A tenant who has ten thousand variables does not stop the loop.
        many = len(env) > _MAX_AT_ONCE
        first, count = (
            await asyncio.to_thread(unknown_variables, env) if many else unknown_variables(env)
        )
        if count:
            self._tell(identity, devices, [str(one) for one in first], count)
        requests = await asyncio.to_thread(parse_requests, env) if many else parse_requests(env)
        if not any(isinstance(one.bitstream_id, NamedBitstream) for one in requests):
            return requests
        return resolved(requests, await self._store.aliases())

    def _tell(
        self, identity: Identity, devices: Sequence[DeviceId], variables: list[str], count: int
    ) -> None:
        """Say what means nothing.

        Raises:
            InvalidRequestError: it may not be there.
        """
        log.warning(
            "FPGA_* variables mean nothing",
            devices=list(devices),
            pod=identity.pod,
            container=identity.container or None,
            variables=variables,
            count=count,
        )
        more = f" and {count - len(variables)} more" if count > len(variables) else ""
        error = InvalidRequestError(
            f"FPGA_* variables mean nothing: {', '.join(variables)}{more}",
            hint="a region without a request is handed over blank; docs/requests.md has the names",
        )
        if self._unknown is UnknownVariables.REFUSE:
            raise error
        self._recorder.warned(identity, devices, str(error))

    async def of(
        self,
        devices: tuple[DeviceId, ...],
        requests: tuple[FpgaRequest, ...],
        *,
        resources: Collection[ResourceName] = (),
    ) -> dict[RegionId, ProgramTarget | FunctionTarget | None]:
        """What the regions of these devices are to become; None: blank.

        `resources`: all that the container has, as far as it is known.

        Raises:
            InvalidRequestError: no request fits, or a parameter is out of its limits.
            RefusedError: more fit than there are devices, a function is asked for that is not
                there, or a card is gone.
            FpgaPluginError: a bitstream is not there, not valid, or not trusted.
        """
        targets = [
            Target(
                region=region.id,
                device=device,
                interface_id=self._ledger.cards[card_of(device)].interface_id,
            )
            for device in devices
            for region in self._ledger.obstacles.regions_of(device)
        ]
        if (function := self._function(devices)) is not None:
            kept = assign_functions(requests, targets, *function, resources)
            for region_id, request in kept.items():
                if request is not None:
                    await self._check_limits(region_id, request)
            return {
                region_id: FunctionTarget(
                    function[1], DriverSettings() if one is None else one.settings
                )
                for region_id, one in kept.items()
            }
        return dict(await self.exactly(assign(requests, targets)))

    async def exactly(
        self, requests: Mapping[RegionId, FpgaRequest | None]
    ) -> dict[RegionId, ProgramTarget | None]:
        """What regions are to become of which each one's request is known; None: blank.

        Raises:
            FpgaPluginError: see `of`.
        """
        targets: dict[RegionId, ProgramTarget | None] = {}
        loaded: dict[tuple[InterfaceId, BitstreamId], Bitstream] = {}
        for region_id, request in requests.items():
            if request is None:
                targets[region_id] = None
                continue
            card = await self._check_limits(region_id, request)
            name = (request.interface_id, request.file_id)
            if name not in loaded:
                loaded[name] = await self._store.load(*name, card.takes)
            check_asked(region_id, request.settings.clock, loaded[name])
            targets[region_id] = ProgramTarget(loaded[name], request.settings)
        return targets

    def _function(self, devices: tuple[DeviceId, ...]) -> tuple[InterfaceId, AfuId] | None:
        """What the call's regions hold, where they are handed over with it."""
        for device in devices:
            allocation = self._ledger.allocations.get(device)
            if (
                allocation is not None
                and (resource := known_resource(allocation.resource)) is not None
            ):
                afu_id = resource.afu_id
                return None if afu_id is None else (resource.interface_id, afu_id)
        return None

    async def _check_limits(self, region_id: RegionId, request: FpgaRequest) -> Card:
        region = self._ledger.region(region_id)
        card = self._ledger.cards.get(card_of(region_id))
        if region is None or card is None:
            raise CardGoneError(f"region {region_id} is gone", hint=MAY_COME_BACK)
        if request.settings != DriverSettings():
            limits = await self._reads.run(
                card.id, partial(self._backend.clock_limits, card, region)
            )
            check_limits(request, limits, region_id)
        return card


def resolved(requests: Sequence[FpgaRequest], aliases: Aliases) -> tuple[FpgaRequest, ...]:
    """The same requests with bitstreams' ids in place of what people call them.

    Raises:
        InvalidRequestError: the store's manifest gives a name to no bitstream of that interface id.
    """

    def by_id(request: FpgaRequest) -> FpgaRequest:
        named = request.bitstream_id
        if not isinstance(named, NamedBitstream):
            return request
        if (found := aliases.get((request.interface_id, named.alias))) is None:
            raise no_such_name(named, request.interface_id)
        return replace(request, bitstream_id=found)

    return tuple(map(by_id, requests))
