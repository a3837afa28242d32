"""Names of span attributes and log fields, in one place (O2): the messaging conventions are still in development.

Messaging names follow OpenTelemetry semantic conventions 1.44; what they lack is under ``messaging.nats`` (names
proposed there) and ``openrl``.
"""

from __future__ import annotations

from typing import Final

SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_SYSTEM_NATS: Final = "nats"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_DESTINATION_TEMPLATE: Final = "messaging.destination.template"
MESSAGING_CONSUMER_GROUP_NAME: Final = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_NATS_STREAM: Final = "messaging.nats.stream"
MESSAGING_NATS_SEQUENCE: Final = "messaging.nats.sequence"
ERROR_TYPE: Final = "error.type"

TENANT: Final = "openrl.tenant"
JOB: Final = "openrl.job"
WORKLOAD: Final = "openrl.workload"
CLAIM: Final = "openrl.claim"
ASSIGNMENT: Final = "openrl.assignment"
NODE: Final = "openrl.node"
REASON: Final = "openrl.reason"
STEP: Final = "openrl.step"
WEIGHTS_VERSION: Final = "openrl.weights.version"
DELIVERIES: Final = "openrl.deliveries"
