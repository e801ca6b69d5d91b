"""Make, change and check a federation's folder: settings, keys, proxy, units, members."""
