"""What kubelet does to the ledger: its lives, and the claims that it makes and ends."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import CardId, DeviceId, PodUid, RegionId, ResourceName
from fpga_plugin.ledger.names import (
    DELETE_THE_POD,
    LEAVE_DRA,
    NOT_READ,
    card_of,
    grants_among,
    is_card,
    is_function,
    names_kind_of,
)
from fpga_plugin.ledger.records import (
    CLEAN,
    Change,
    Claim,
    Condition,
    Debug,
    Epoch,
    Tenancy,
)
from fpga_plugin.ledger.state import LedgerState
from fpga_plugin.pods.cgroup import Cgroup


class Claims(LedgerState):
    """The ledger's steps on the side of kubelet."""

    def kubelet_epoch(self, epoch: str) -> None:
        """A life of kubelet, which may be another than before.

        Between its start and our registration kubelet starts containers without PreStart, so every
        claim may have been used, and PostStops of before cannot be counted any more. Holds even if
        it cannot be written.
        """
        if epoch == self.epoch:
            return
        change = Change(epochs={Epoch.KUBELET: epoch}, strays=dict.fromkeys(self.strays, 0))
        for device, claim in self.claims.items():
            if not claim.exposed:
                change.claims[device] = replace(claim, exposed=True)
            self._use(change, self.users(claim))
        self._commit(change)

    @staticmethod
    def _use(change: Change, tenancies: Iterable[Tenancy]) -> None:
        """A container of these may have the nodes from now on."""
        change.tenancies |= {one.key: replace(one, used=True) for one in tenancies if not one.used}

    @property
    def sends_env(self) -> bool:
        """Whether this kubelet is known to send the environment in PreStart."""
        return bool(self.env_epoch) and self.env_epoch == self.epoch

    def env_seen(self) -> None:
        """This kubelet sent a non-empty environment."""
        if not self.sends_env:
            self._commit(Change(epochs={Epoch.ENVIRONMENT: self.epoch}))

    def allocate(self, resource: ResourceName, ids: Sequence[str]) -> tuple[Claim, ...]:
        """Grant devices: all of them, or none.

        Of a device that is owned under the same resource: without a PreStart since the last
        Allocate this is the same pod's next container, or the pod never started; with one it is an
        implied release of exactly this device, and PreStart sorts out the rest.

        Raises:
            UnknownDeviceError: no such device.
            RefusedError: the card is used in the other mode, the hardware failed, or a node is in
                another pod's hands.
            JournalError: nothing was granted.
        """
        devices = self.check_devices(resource, ids)
        self.activity.update(devices)
        change = Change()
        implied = 0
        granted: list[Claim] = []
        for device in devices:
            self._check_mode(device, devices)
            regions = self.regions_of(device)
            for region in regions:
                self._check_kept(region.id)
                if reason := self.trouble(region.id):
                    raise RefusedError(
                        f"region {region.id} is faulted: {reason}",
                        hint="the operator finds what to do in docs/runbook.md; " + DELETE_THE_POD,
                    )
                self._check_strangers(region)
            held = self.claims.get(device)
            if (holder := self.holder_of(device)) is not None:
                raise RefusedError(
                    f"{device} belongs to ResourceClaim {holder.full_name}",
                    hint=LEAVE_DRA,
                )
            self._check_in_service(card_of(device), owned=held is not None)
            self._check_exposure(device)
            if held is not None and not held.touched and not held.exposed:
                granted.append(self._grant_again(change, held))
                continue
            if held is not None:
                self._check_served(resource)
                self._check_present(device, resource)
                self._release(change, held)
                implied += 1
            claim = Claim(
                device=device,
                resource=resource,
                grants={region.id: region.grant for region in regions},
                epoch=self.epoch,
                prestarts=change.strays.get(device, self.strays.get(device, 0)),
                generation=next(self._generations),
                since=self._clock(),
            )
            change.claims[device] = claim
            self._begin(change, claim, [None], used=False)
            change.strays[device] = 0
            self._end_debug(change, claim.grants)
            granted.append(claim)
        self._commit(change)
        self.ends["implied"] += implied
        return tuple(granted)

    def _check_kept(self, region: RegionId) -> None:
        """Whether a region is not kept for debugging.

        Raises:
            RefusedError: it is.
        """
        if self.kept(region) is not None:
            card = card_of(region)
            raise RefusedError(
                f"region {region} is {self.trouble(region)}",
                hint="the pod's controller makes a new pod, which is placed anew; the operator ends"
                f" it with `fpga-plugin card release {card}`",
            )

    def _grant_again(self, change: Change, held: Claim) -> Claim:
        """A claim of which nothing began: to the same pod, or to another after one that failed.

        Raises:
            RefusedError: its nodes are other devices' by now; the claim is ended.
        """
        try:
            self.check_grants(held)
        except RefusedError:
            # Whoever was given the old nodes could never start, nor can whoever shares them;
            # kept, the claim would refuse every later pod too.
            self.release([held.device])
            raise
        if held.pod is not None:  # whose it is now has to be learnt again
            change.tenancies |= dict.fromkeys((one.key for one in self.users(held)), None)
            held = change.claims[held.device] = replace(held, pod=None)
            self._begin(change, held, [None], used=False)
        return held

    def _check_served(self, resource: ResourceName) -> None:
        """Whether another pod may have what an owner has from before regions keep their functions.

        Raises:
            RefusedError: it may not.
        """
        if self.serves_functions and not is_function(resource):
            raise RefusedError(
                f"{resource} is left to the pods that have it: regions are handed over with the"
                " functions that are on them (FPGA_PLUGIN_ADVERTISE=af)",
                hint="ask for the function's resource, which begins with af-",
            )

    def _check_present(self, device: DeviceId, resource: ResourceName) -> None:
        """Whether another pod may have a device under the name by which its owner has it.

        Kubelet gave it from the list of before. Given again under it, claim after claim would keep
        the former name, or a meaning that an alias has no more, for as long as pods ask for it.

        Raises:
            RefusedError: it is given out under another by now.
        """
        present = self.present_resource(device)
        if present not in {None, resource}:
            raise RefusedError(
                f"{resource} is left to the pods that have it: {device} is given out as {present}",
                hint=f"ask for {present}",
            )

    def _check_in_service(self, card: CardId, *, owned: bool) -> None:
        """Whether devices of a card are given to anybody, or only to those that own them.

        Raises:
            RefusedError: they are not.
        """
        another = "the pod's controller makes a new pod, which is placed anew"
        if (why := self.foreign.get(card)) is not None:
            raise RefusedError(f"card {card} is left alone: {why}")
        if card in self.rebinding:
            raise RefusedError(f"the driver of card {card} is being rebound", hint=another)
        # Of an owned device too: the claim of a damaged journal may be one that ended long ago.
        if card in self.unreconciled:
            raise RefusedError(
                f"who has card {card} is not known: {self.claims_unknown or NOT_READ}",
                hint=LEAVE_DRA
                if self.claims_unknown
                else f"{another}; the plugin's log says what keeps it from reading them",
            )
        if owned:
            return
        if card in self.drained:
            raise RefusedError(
                f"card {card} is being taken out of service",
                hint=f"{another}; the operator ends it with `fpga-plugin card undrain`",
            )

    def _check_exposure(self, device: DeviceId) -> None:
        """Whether the operator lets anybody new have it.

        Asked of an owned device too: kubelet may have given it to another pod by now, before the
        end of its owner was seen, and it asks for no pod a second time.

        Raises:
            RefusedError: they do not.
        """
        card = self.cards.get(card_of(device))
        if card is None:
            return
        whole = is_card(device)
        if why := self.exposure.refusal(card, whole=whole):
            raise RefusedError(
                f"card {card.id} is not given {'as a whole' if whole else 'by region'}: {why}",
                hint="the operator allows it by that setting; the pod's controller makes a new"
                " pod, which is placed anew",
            )

    def _check_mode(self, device: DeviceId, with_: Sequence[DeviceId]) -> None:
        card = card_of(device)
        whole = is_card(device)
        holders = [c.device for c in self.claims_on(card) if is_card(c.device) != whole]
        # A call is for one resource, so its devices are of one kind; this guards the guard.
        holders += [d for d in with_ if card_of(d) == card and is_card(d) != whole]
        if holders:
            have = f"its regions {', '.join(sorted(holders))} are" if whole else "the whole card is"
            raise RefusedError(
                f"card {card} cannot be given {'as a whole' if whole else 'by region'}: {have} in"
                " use",
                hint="kubelet's view was out of date; the pod's controller makes a new pod, which"
                " is placed anew",
            )

    def adopt(
        self,
        resource: ResourceName,
        device: DeviceId,
        pod: PodUid | None,
        env: Mapping[str, str],
    ) -> Claim:
        """Make the claim that kubelet's records show and the ledger lacks (a lost journal).

        Args:
            resource: under which kubelet has it.
            device: which; its card need not be there.
            pod: whose.
            env: the variables that the pod was given, `FPGA_DEVICE_<REGION ID>` among them; where
                kubelet kept none, its regions' present grants are taken for it.

        Raises:
            RefusedError: it conflicts with what the ledger knows, or nothing tells its nodes.
        """
        if device in self.claims:
            raise RefusedError(f"{device} has an owner already", hint=DELETE_THE_POD)
        if not names_kind_of(resource, device):
            raise RefusedError(f"{device} is no device of {resource}")
        self._check_mode(device, ())
        grants = grants_among(device, env)
        grants = grants or {region.id: region.grant for region in self.regions_of(device)}
        claim = Claim(
            device=device,
            resource=resource,
            grants=grants,
            exposed=True,
            pod=pod,
            epoch=self.epoch,
            prestarts=1 + self.strays.get(device, 0),  # one was not seen: never balanced
            generation=next(self._generations),
            since=self._clock(),
        )
        change = Change(claims={device: claim}, strays={device: 0})
        self._begin(change, claim, [pod], used=True)
        self._end_debug(change, grants)
        if resource not in self.resources:
            change.resources[resource] = True  # kubelet re-admits its pods by this name
        for region in grants:
            record = self.record(region)
            # PROGRAMMED without an owner: an operator did that, for himself.
            if record.condition in CLEAN | {Condition.PROGRAMMED}:
                change.regions[region] = replace(
                    record, condition=Condition.DIRTY, reason="a pod may have used it"
                )
        self._commit(change)
        return claim

    def reconciled(self, cards: Iterable[CardId]) -> None:
        """What kubelet's records show of these cards was adopted: all their owners are known."""
        known = self.unreconciled.intersection(cards)
        self.unreconciled -= known
        for card in known:
            self._notify(card)

    def keep_back(self, cards: Iterable[CardId]) -> None:
        """Who has these cards is not known: kubelet's records name somebody who is no owner."""
        new = set(cards) - self.unreconciled
        self.unreconciled |= new
        for card in new:
            self._notify(card)

    def bind_pod(
        self,
        devices: Iterable[DeviceId],
        pod: PodUid,
        env: Mapping[str, str] = MappingProxyType({}),
        cgroups: Collection[Cgroup] = (),
    ) -> None:
        """Kubelet's records name the pod that owns these devices.

        A claim that is known to be another pod's is released and made again: kubelet gave the
        device to somebody else without our hearing of it.

        Args:
            devices: whose pod it is.
            pod: which.
            env: as of `adopt`, where the pod is another one; empty: it has the nodes of before.
            cgroups: those of the pod, while a container of it is about to start.
        """
        change = Change()
        implied = 0
        for device in devices:
            claim = self.claims.get(device)
            if claim is None:
                continue
            if claim.pod in {None, pod}:
                self._bind(change, claim, pod, cgroups)
                continue
            self._release(change, claim)
            self._end_debug(change, claim.grants)
            implied += 1
            claim = change.claims[device] = Claim(
                device=device,
                resource=claim.resource,
                grants=grants_among(device, env) or claim.grants,
                exposed=True,
                pod=pod,
                epoch=self.epoch,
                prestarts=1 + change.strays.pop(device, 0),  # as in adopt
                generation=next(self._generations),
                since=self._clock(),
            )
            self._begin(change, claim, [pod], used=True)
        self._commit(change)
        self.ends["implied"] += implied

    def _bind(self, change: Change, claim: Claim, pod: PodUid, cgroups: Collection[Cgroup]) -> None:
        """The pod of an allocation is this one, and runs in these cgroups."""
        if claim.pod is None:
            change.claims[claim.device] = replace(claim, pod=pod)
        for one in self.users(claim):
            key = replace(one.key, pod=pod)
            # Beside the pod's there is one without a name where its end could not be written.
            same = [each for each in (self.tenancies.get(key), one) if each is not None]
            cgroups = tuple(dict.fromkeys([*(c for each in same for c in each.cgroups), *cgroups]))
            used = any(each.used for each in same)
            now = replace(one, key=key, used=used, cgroups=cgroups)
            if now != one:
                change.tenancies |= {one.key: None, key: now}

    def prestart_seen(self, devices: Iterable[DeviceId]) -> None:
        """Count a PreStart, before anything is known of its outcome.

        Raises:
            JournalError: it cannot be written, and counts all the same: its PostStop will come.
        """
        change = Change()
        for device in devices:
            self.activity[device] += 1
            claim = self.claims.get(device)
            if claim is None:
                continue
            # Of starts that failed while the plugin was away the PostStops may still come. Before
            # this one nothing ran but what ran then, so the counts held.
            epoch = "" if device in self._inherited else claim.epoch
            change.claims[device] = replace(
                claim, touched=True, prestarts=claim.prestarts + 1, epoch=epoch
            )
        self._commit(change)

    def poststop_seen(self, devices: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        """Count a PostStop; returns the devices for which they balance the PreStarts.

        Where one was started, their regions are DIRTY then, whatever it was given. A
        PostStop may come long after its claim ended, and carries nothing but device ids: those
        that are still to come of earlier claims are counted first.
        """
        change = Change()
        balanced = []
        for device in devices:
            claim = self.claims.get(device)
            if claim is None:
                if strays := self.strays.get(device, 0):
                    change.strays[device] = strays - 1
                continue
            if claim.poststops >= claim.prestarts:
                continue
            claim = replace(claim, poststops=claim.poststops + 1)
            change.claims[device] = claim
            if self._stopped(claim):
                balanced.append(device)
                for region in claim.grants if claim.started else ():
                    record = self.record(region)
                    if record.condition not in (Condition.FAULTED, Condition.SCRUBBING):
                        change.regions[region] = replace(
                            record,
                            condition=Condition.DIRTY,
                            reason="as many containers of its owner ended as began",
                        )
        self._commit(change)
        return tuple(balanced)

    def balanced(self, device: DeviceId) -> bool:
        """Whether every container that was started under the claim is known to have stopped."""
        claim = self.claims.get(device)
        return claim is not None and self._stopped(claim)

    def _countable(self, claim: Claim) -> bool:
        """Whether every container of the claim came with a PreStart that was seen."""
        return claim.epoch == self.epoch and not claim.exposed

    def _stopped(self, claim: Claim) -> bool:
        return claim.touched and self._countable(claim) and claim.prestarts == claim.poststops

    def started(self, claims: Iterable[Claim], debug: Debug | None = None) -> None:
        """A PreStart succeeded and is about to be answered.

        `debug`: what its pod asks for should the container fail; of any region.
        """
        change = Change()
        for claim in claims:
            current = self.claims[claim.device]
            self._end_debug(change, current.grants)
            self._use(change, self.users(current))
            for region in current.grants:
                if debug is not None:
                    change.debugs[region] = replace(debug, region=region)
            if not current.started:
                change.claims[claim.device] = replace(current, started=True)
        self._commit(change)

    def release(self, devices: Iterable[str]) -> tuple[DeviceId, ...]:
        """End the claims on these devices; unknown and unowned ones are passed over.

        Returns those that were owned.
        """
        change = Change()
        released = []
        for text in devices:
            claim = self.claims.get(DeviceId(text))
            if claim is not None and self.holder_of(claim.device) is not None:
                continue  # no call of the device plugin API is about it
            if claim is not None and claim.device not in change.claims:
                self._release(change, claim)
                change.claims[claim.device] = None
                released.append(claim.device)
        self._commit(change)
        self.activity.update(released)
        self.ends["released"] += len(released)
        return tuple(released)

    def _release(self, change: Change, claim: Claim) -> None:
        """What the end of a claim does to its regions, and to who may be using them."""
        # After the next Allocate kubelet sends no more than the PostStop that it had begun to send.
        unseen = 0 if self._countable(claim) else 1
        change.strays[claim.device] = max(claim.prestarts - claim.poststops, unseen)
        users = self.users(claim)
        used = {one.region for one in users if one.used}
        if claim.used and self.holder_of(claim.device) is not None:
            used |= claim.grants.keys()  # pods of a ResourceClaim that used it may be forgotten
        # Of a pod that was never known kubelet's word is all that there is.
        self._end(change, [one for one in users if not one.used or one.pod is None])
        change.tenancies |= {
            one.key: replace(one, left=True) for one in users if one.used and one.pod is not None
        }
        for region in claim.grants:
            record = change.regions.get(region) or self.record(region)
            unused = region not in used and record.condition in CLEAN
            if record.condition not in (Condition.FAULTED, Condition.SCRUBBING) and not unused:
                reason = "its owner left" if claim.used else record.reason or "its owner left"
                change.regions[region] = replace(record, condition=Condition.DIRTY, reason=reason)

    def end_tenancies(self, tenancies: Iterable[Tenancy]) -> None:
        """The processes of these are gone: nobody opens a region by their nodes."""
        change = Change()
        present = (self.tenancies.get(one.key) for one in tenancies)
        self._end(change, [one for one in present if one is not None and one.left])
        self._commit(change)
