from ultrascale.api.check import check as check
from ultrascale.api.plan import compare as compare
from ultrascale.api.plan import plan as plan
from ultrascale.api.plan import search as search
from ultrascale.api.report import report as report
from ultrascale.api.schedule import schedule as schedule
from ultrascale.api.sweep import sweep as sweep
from ultrascale.api.trace import trace as trace
from ultrascale.spec.problems import SpecError as SpecError

__version__: str
__all__ = ["SpecError", "__version__", "check", "compare", "plan", "report", "schedule", "search", "sweep", "trace"]
