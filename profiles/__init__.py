"""What machines can do: measured or described, stored as readable files, and looked up.

The cost model asks a `Profile` for the time of an op or a collective and gets a `Lookup`:
a time, what it stands on and an error bar. `measure_profile` makes a profile of the machine
it runs on; profiles of common GPU machines are shipped in profiles/data.
"""

from profiles.catalog import default_profile, load_profile, own_profile_dir
from profiles.check import check_profile
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
    "load_profile",
    "measure_profile",
    "own_profile_dir",
    "shipped_names",
]
