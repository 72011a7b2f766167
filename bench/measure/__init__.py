"""All measurements, by the names that `python -m bench` takes."""

from bench import peers
from bench.measure.agents import written
from bench.measure.conversations import conversations
from bench.measure.files import compression, spilling
from bench.measure.first_token import first_token
from bench.measure.looking_up import look_up, ssd_look_up
from bench.measure.memory import eviction, next_turn, promotion_peak, sharing
from bench.measure.opening import opening
from bench.measure.pauses import pauses
from bench.measure.promotion import promotion
from bench.measure.replay import replay
from bench.measure.serving import serving
from bench.result import Measurement

MEASUREMENTS: dict[str, Measurement] = {
    "compression": compression,
    "eviction": eviction,
    "next_turn": next_turn,
    "sharing": sharing,
    "conversations": conversations,
    "written": written,
    "first_token": first_token,
    "look_up": look_up,
    "ssd_look_up": ssd_look_up,
    "opening": opening,
    "promotion": promotion,
    "peak": promotion_peak,
    "pauses": pauses,
    "spilling": spilling,
    "serving": serving,
    "replay": replay,
    "peers": peers.compare,
}
