"""Policy: which request runs when, on numbers alone."""

from engine.scheduler.plan import ScheduledStep as ScheduledStep
from engine.scheduler.scheduler import Scheduler as Scheduler
from engine.scheduler.scheduler import TokenUpdate as TokenUpdate
