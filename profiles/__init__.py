"""What machines can do: measured or described, stored as readable files, and looked up.

What comes in: a measured directory, or the name of a device in `data/`. What goes out: a `Profile`,
which returns the time of an op or a collective as a `Lookup`: seconds, their source, an error.

`load_cluster` reads a cluster file: a profile for each group of devices, with the tiers of links
around them.

Read `records` (what a profile holds), `profile` (its questions), `lookup/` (how a time is found),
then `devices` (what comes with planner), `catalog` and `store` (finding and reading a profile), and
`measure/` (making a profile of this machine) and `calibration` (what recorded runs say of it).
"""

from profiles.catalog import default_profile, load_profile, own_profile_dir, save_profile
from profiles.check import check_profile
from profiles.cluster_file import load_cluster
from profiles.devices import shipped_names
from profiles.measure.measure import measure_profile
from profiles.profile import Profile
from profiles.records import Group, Lookup, OpQuery

__all__ = [
    "Group",
    "Lookup",
    "OpQuery",
    "Profile",
    "check_profile",
    "default_profile",
    "load_cluster",
    "load_profile",
    "measure_profile",
    "own_profile_dir",
    "save_profile",
    "shipped_names",
]
