"""Sample text for measuring translations: prose, code and data in several scripts."""

SAMPLE = '''\
The harbour was quiet when the last ferry came in. Two passengers left, an old man with a suitcase and a girl who
carried a violin; neither of them looked at the timetable. "You could have called," said the captain's daughter, and
she wasn't joking. In 1998, about 42% of all households in the region had no telephone, but that has changed since.

Photosynthesis converts light energy into chemical energy. Plants use it to synthesize carbohydrates from carbon
dioxide and water, releasing oxygen as a by-product. To reproduce the experiment, follow these steps:

1. Fill a beaker with 250 ml of water and add 2 g of baking soda.
2. Place a pondweed (Elodea) under a funnel, and turn on the lamp.
3. Count the bubbles per minute at distances of 10, 20 and 40 cm.

```python
def moving_average(values: list[float], width: int = 3) -> list[float]:
    """Return the mean of each window of `width` values."""
    if width < 1 or len(values) < width:
        raise ValueError(f"width must be between 1 and {len(values)}")
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


class Cache(dict):
    def __missing__(self, key):
        self.misses += 1
        return self.setdefault(key, load(key))
```

{"user": {"id": 10482, "name": "Zoë Müller", "email": "zoe@example.org", "tags": ["admin", "beta"]}, "active": true,
"balance": -12.75, "address": null}

SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON orders.customer_id = customers.id GROUP BY name;

Die Straßenbahn fährt alle zehn Minuten, außer an Feiertagen. Nous avons déjà visité le musée près de la gare.
Mañana por la mañana iremos a la playa. Поезд прибывает на третий путь. 今天的天气很好我们去公园散步吧。
東京は日本の首都です。 Thanks 👍🏽, see you on Friday! 🎉
'''
