"""The optional parts of the library that are on, in the order in which they are asked.

The kernel knows none of them: each registers itself where it is imported.
"""

from .transports import custom
from .transports.compressed import transports as compressed
from .transports.host import exchange

PARTS = (custom, compressed, exchange)
