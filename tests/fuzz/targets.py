"""Everything that is fuzzed: every reader of foreign bytes, by where they come from."""

import clients
import devices
import kubelets
import operators
import records
import tenants

TARGETS = {
    **operators.TARGETS,
    **tenants.TARGETS,
    **clients.TARGETS,
    **kubelets.TARGETS,
    **devices.TARGETS,
    **records.TARGETS,
}
