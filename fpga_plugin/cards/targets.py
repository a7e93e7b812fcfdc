"""Decides what each region of a call becomes: matches requests to regions, reads bitstreams."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    assign,
    check_limits,
    no_such_name,
)
from fpga_plugin.allocation.requests.unknown_variables import requests_in, unknown_variables
from fpga_plugin.bitstreams.manifest import Aliases
from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.cards.clocks import check_asked
from fpga_plugin.cards.operations import CardOperations
from fpga_plugin.cards.prepare import Target
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
        recorder: makes Events of variables that have no meaning.
        unknown: whether such variables are refused.
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

    async def explained(self, error: FpgaPluginError) -> FpgaPluginError:
        """The same error for people: a title gets its id, ids get their names of the manifest.

        It uses the names that were read last: the call's time may be up, so it waits for no store
        but a second where a title may have been asked for.
        """
        asked = error.asked if isinstance(error, InvalidRequestError) else ""
        if asked and (ids := await self._store.titled(asked)):
            hint = f"it is the title of bitstream {ids}: ask for that"
            return InvalidRequestError(error.message, hint=hint)
        return self._store.known_names.error(error)

    async def requests(
        self, identity: Identity, devices: Sequence[DeviceId], env: Mapping[str, str]
    ) -> tuple[FpgaRequest, ...]:
        """What a container asks for, by ids; reports its FPGA_* variables that have no meaning.

        Names of bitstreams are looked up here, once a call: so the policy is asked about the same
        bitstream that is programmed.

        Raises:
            InvalidRequestError: a request is wrong, or a variable has no meaning and such variables
                are refused.
            FpgaPluginError: the manifest, which has the names of bitstreams, cannot be read.
        """
        # Ten thousand variables of a tenant must not stop the event loop.
        many = len(env) > _MAX_AT_ONCE
        first, count = (
            await asyncio.to_thread(unknown_variables, env) if many else unknown_variables(env)
        )
        if count:
            self._tell(identity, devices, [str(one) for one in first], count)
        requests = await asyncio.to_thread(requests_in, env) if many else requests_in(env)
        if not any(isinstance(one.bitstream_id, NamedBitstream) for one in requests):
            return requests
        return resolved(requests, await self._store.aliases())

    def _tell(
        self, identity: Identity, devices: Sequence[DeviceId], variables: list[str], count: int
    ) -> None:
        """Report variables without a meaning.

        Raises:
            InvalidRequestError: such variables are refused.
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
    ) -> dict[RegionId, Target | None]:
        """The target of each region of these devices; None: blank.

        `resources`: all that the container is known to have.

        Raises:
            InvalidRequestError: no request fits, or a parameter is out of its limits.
            RefusedError: more fit than there are devices, a function is asked for that is not
                there, or a card is gone.
            FpgaPluginError: a bitstream is not there, not valid, or not trusted.
        """
        regions = self.interfaces(devices)
        if (function := self._function(devices)) is not None:
            kept = assign_functions(requests, regions, *function, resources)
            for region_id, request in kept.items():
                if request is not None:
                    await self._check_limits(region_id, request)
            return {
                region_id: Target(function[1], DriverSettings() if one is None else one.settings)
                for region_id, one in kept.items()
            }
        return await self.exactly(assign(requests, regions))

    def interfaces(self, devices: Iterable[DeviceId]) -> dict[RegionId, InterfaceId]:
        """The regions of devices, in their order, with the interface id of each."""
        return {
            region.id: self._ledger.cards[card_of(device)].interface_id
            for device in devices
            for region in self._ledger.obstacles.regions_of(device)
        }

    async def exactly(
        self, requests: Mapping[RegionId, FpgaRequest | None]
    ) -> dict[RegionId, Target | None]:
        """The targets of regions, given the request of each; None: blank.

        Raises:
            FpgaPluginError: see `of`.
        """
        targets: dict[RegionId, Target | None] = {}
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
            targets[region_id] = Target(loaded[name], request.settings)
        return targets

    def _function(self, devices: tuple[DeviceId, ...]) -> tuple[InterfaceId, AfuId] | None:
        """The function of the call's regions, if they are handed over with it."""
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
    """The same requests with bitstreams' ids in place of their names.

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
