"""Our tables beside Optuna's in the one database. Times are naive UTC here, and aware in Python."""

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

sweeps = Table(
    "fraternal_sweeps",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=True),  # the order in which sweeps came
    Column("id", String(40), unique=True, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("state_since", DateTime),
    Column("state_reason", Text),
    Column("generation", Integer, nullable=False, default=0),
    Column("epochs_at_launch", Integer, nullable=False, default=0),
    Column("fruitless_launches", Integer, nullable=False, default=0),
    Column("driver", JSON(none_as_null=True)),
    Column("lease_until", DateTime),
    Column("created_at", DateTime, nullable=False),
    Column("started_at", DateTime),
    Column("finished_at", DateTime),
    Column("ran_s", Float, nullable=False, server_default="0"),  # before it came to run as it runs now
    Column("running_since", DateTime),
    Column("study", String(64)),
    Column("retry_numbers", JSON(none_as_null=True)),  # of failed trials that the next driver tries again
    Column("revision", Integer, nullable=False, server_default="1"),  # of what clients have asked for
    Column("wants", Integer),  # trials that it could run at once, as its driver says
    Column("writes", Integer),  # transactions in which something of its trials was; null: nobody counts them
)

totals = Table(
    "fraternal_totals",  # counters that deleting sweeps must not set back
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Integer, nullable=False),
)

leases = Table(
    "fraternal_leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("holder", JSON, nullable=False),
    Column("until", DateTime, nullable=False),
)

epochs = Table(
    "fraternal_epochs",
    metadata,
    Column("sweep_id", ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("recorded_at", DateTime, nullable=False),
    Column("train_loss", Float, nullable=False),
    Column("valid_loss", Float, nullable=False),
    Column("raw_valid_loss", Float, nullable=False),
    Column("averaged", Boolean, nullable=False),
    Column("optimised", Float, nullable=False),
    Column("penalty", Float, nullable=False),
    Column("ar", Float, nullable=False),
    Column("tar", Float, nullable=False),
    Column("gradient_norm", Float, nullable=False),
    Column("lr", Float),
    Column("pair_difference", Float),
    Column("prediction_variance", Float),
    Column("expectation_gap", Float),
    Column("tokens", Integer, nullable=False),
    Column("tokens_per_s", Float),
    Column("seconds", Float, nullable=False),
    Column("is_best", Boolean, nullable=False),
)

events = Table(
    "fraternal_events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("sweep_id", ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("at", DateTime, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("detail", JSON, nullable=False),
    Column("once", String(96)),  # of what is told of one time in a sweep: which
    Index("ix_fraternal_events_once", "sweep_id", "once", unique=True),
)

points = Table(
    "fraternal_points",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),  # the order in which they are tried
    Column(
        "sweep_id",
        ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("params", JSON, nullable=False),
    Column("draw", Integer),  # that it was tried as; null: none yet
    Column("created_at", DateTime, nullable=False),
)

trial_wishes = Table(
    "fraternal_trial_wishes",
    metadata,
    Column("sweep_id", ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("pinned", Boolean, nullable=False),
    Column("stopping", Boolean, nullable=False),
)

verifications = Table(
    "fraternal_verifications",  # of best checkpoints, evaluated again
    metadata,
    Column("sweep_id", ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("outcome", String(16), nullable=False),
    Column("recorded_sha256", String(64)),  # of the checkpoint on record then: says of which record this is
    Column("checkpoint_sha256", String(64)),
    Column("epoch", Integer),
    Column("recorded_valid_loss", Float),
    Column("valid_loss", Float),
    Column("tolerance", Float),
    Column("device", Text),
    Column("runtime", Text),
    Column("seconds", Float, nullable=False),
    Column("message", Text),
    Column("verified_at", DateTime, nullable=False),
)

answers = Table(
    "fraternal_answers",  # to requests with an Idempotency-Key
    metadata,
    Column("owner", String(32), primary_key=True),  # id of the token that it came with, or nothing
    Column("key", String(255), primary_key=True),
    Column("request_sha256", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("headers", JSON, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", DateTime, nullable=False, index=True),
)

tokens = Table(
    "fraternal_tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("scope", String(16), nullable=False),
    Column("secret_sha256", String(64), nullable=False),
    Column("created_at", DateTime, nullable=False),
    Column("expires_at", DateTime),
    Column("revoked_at", DateTime),
)

sessions = Table(
    "fraternal_sessions",  # browsers, signed in with a token
    metadata,
    Column("id", String(32), primary_key=True),
    Column(
        "token_id",
        ForeignKey("fraternal_tokens.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("secret_sha256", String(64), nullable=False),
    Column("created_at", DateTime, nullable=False),
    Column("expires_at", DateTime, nullable=False),
)

webhooks = Table(
    "fraternal_webhooks",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False),  # signs what is sent, so it cannot be a digest
    Column("kinds", JSON(none_as_null=True)),  # of events; null: all
    Column("sweep_id", String(40), index=True),  # null: all; outlives its sweep, until all is delivered
    Column("created_at", DateTime, nullable=False),
    Column("attempts", Integer, nullable=False),  # in vain, since the last one that was not
    Column("due_at", DateTime),  # after an attempt in vain, when the next one is
    Column("delivered_at", DateTime),
    Column("failed_at", DateTime),
    Column("failure", Text),
    Column("dropped", Integer, nullable=False),  # deliveries that were given up
    Column("disabled_at", DateTime),
)

deliveries = Table(
    "fraternal_deliveries",  # events on their way to webhooks, written with the event itself
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),  # the order in which they are sent
    Column("webhook_id", ForeignKey("fraternal_webhooks.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("message_id", String(80), nullable=False),
    Column("body", Text, nullable=False),  # so that it outlives its event, when the sweep is deleted
    Column("created_at", DateTime, nullable=False),
)
