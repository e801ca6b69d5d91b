"""What an adapter or a method does: exactness against the true mean, drift in other coordinates, spectra."""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.analysis.audit import Audit, gauge_drift, mean_update, padded_average_error
    from fedlora.analysis.inspection import difference, facts, overlap

__getattr__ = face(
    "fedlora.analysis",
    {
        "audit": ("Audit", "gauge_drift", "mean_update", "padded_average_error"),
        "inspection": ("difference", "facts", "overlap"),
    },
)

__all__ = ["Audit", "difference", "facts", "gauge_drift", "mean_update", "overlap", "padded_average_error"]
