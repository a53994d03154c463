"""One thread for every library, before NumPy or torch is loaded, and hypothesis without deadlines."""

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[variable] = "1"

from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("reconbound", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("reconbound")
