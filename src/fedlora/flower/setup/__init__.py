"""A federation's folder made, changed and checked: settings, keys, proxy, units, members."""
