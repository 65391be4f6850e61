#!/usr/bin/env python3
"""Makes the demo corpus: short records on six topics, joined by one space into documents, as JSONL and Parquet.

All texts were written for this project. Needs pyarrow; run it in this folder after changing a record.
"""
import json

TOPICS = {
    "bread": [
        "A sourdough starter is a culture of wild yeast and lactic bacteria kept in flour and water. Feed it with equal weights of both once a day, and it doubles within six hours when it is ready for baking. A grey liquid on top only means that it is hungry; pour it off and feed the rest.",
        "Rye flour holds more water than wheat and forms hardly any gluten, so a rye dough feels like wet clay and cannot be kneaded. Bakers mix it, leave it to ferment in a tin, and judge it by the small holes that open on its floured surface.",
        "Steam in the first ten minutes keeps the crust soft while the loaf expands. At home a cast iron pot with a lid does the work of a professional oven, because the dough fills it with its own moisture. Take the lid off halfway, or the crust stays pale.",
        "Salt slows yeast down and tightens gluten. Two percent of the flour weight is usual; with less the loaf tastes flat and rises too fast, with more it rises late and stays dense.",
        "Day old baguettes go stale because starch crystallises, not because they dry out. Warming a slice to seventy degrees melts the crystals again, which is why toast from old bread seems fresh for a few minutes.",
        "Cold fermentation overnight in a refrigerator at five degrees gives enzymes time to free sugars from starch. The loaf browns better and tastes of more than flour, and the baker can sleep.",
        "Flatbreads need no oven. A ball of dough rolled thin puffs up on a hot iron plate when the water inside turns to steam faster than it can escape, and the two layers come apart.",
        "Milling heats grain, and the oil in the germ turns rancid within weeks. White flour keeps for a year because germ and bran were sifted out; wholemeal flour should be bought fresh and used up in a month.",
        "Old dough kept back from yesterday's batch is the simplest preferment. A fifth of the new flour weight is enough to shorten the first rise by half and to bring some acidity.",
        "A baker's peel dusted with semolina lets a loaf slide off without sticking. Plain flour is absorbed by the wet underside and glues the dough to the wood within a minute.",
    ],
    "rivers": [
        "A meandering river erodes the outer bank of each bend, where the current is fast, and drops sand on the inner one. The bends grow until two of them meet; the river then cuts through the neck and leaves a curved lake behind.",
        "Floods on the lower reach arrive days after the rain that caused them. Gauges in the hills measure the crest while it is still narrow, and a table made from earlier floods tells the towns downstream when to close their gates.",
        "Salmon find the stream where they hatched by its smell. Young fish remember the mixture of plants and minerals in the water, and years later follow it upstream past every other tributary.",
        "A weir raises the water level for a mill or for boats, yet it stops gravel on its way to the sea. Below it the bed wears down to bare rock, and banks that once stood firm begin to slide.",
        "In dry countries some rivers never reach an ocean. They spread over a plain, feed reeds and shallow pans, and the sun takes what is left, so that only salt remains at the end of summer.",
        "Ferries on a cable use the current alone. The boat is held at an angle by two lines, and the water pushes it sideways across the river like a sail pushes a yacht.",
        "River ice breaks up with a noise like gunfire. Floes pile against bridges, dam the water behind them, and can lift a wooden span off its piers within an hour.",
        "The delta grows where the river meets still water and lets its load fall. Each flood builds a new lobe; between floods the older lobes sink, and the sea takes them back.",
        "Beavers slow a brook with dams of willow and mud. Behind each dam silt settles, the water table rises, and within ten years a straight ditch has become a chain of ponds full of frogs.",
        "Dissolved oxygen is lowest before dawn, because plants have breathed all night and not yet begun to work. Fish that gasp at the surface at five in the morning are the first sign of too much fertiliser upstream.",
    ],
    "bicycles": [
        "A chain wears at its pins and seems to grow longer. When twelve links measure more than an eighth of an inch beyond a foot, replace it, or the sprockets wear to the same wrong pitch and must be replaced too.",
        "Tubeless tyres seal small holes by a milk of latex that flows to the leak and dries there. It must be topped up every few months; in a hot shed it turns into a rubber ball that rattles in the rim.",
        "Spokes hold a rim by pulling, never by pushing. A wheel carries its load because the spokes below the hub lose a little of their tension, while the others hardly notice.",
        "Disc brakes with hydraulic lines need no adjustment as the pads wear. Air in the line makes the lever soft; bleeding pushes it out with fresh fluid from the caliper upwards.",
        "Riders stay upright by steering into a fall. Even a riderless bicycle does so above a certain speed, and it does so without the gyroscopic effect that textbooks liked to blame.",
        "Hub gears hide their planets in oil and keep out rain. They waste a few percent more than a clean derailleur, but after a winter of salt and no care they are usually the better machine.",
        "A saddle too low hurts the front of the knee, one too high makes the hips rock. With the heel on the pedal at its lowest point the leg should be just straight.",
        "Panniers low on a front rack make a loaded bicycle steadier than the same weight behind. The steering grows slower, which is pleasant on a long road and tiresome in a town.",
        "Dynamo lights cost the rider about as much as a slope of one in a thousand. Modern ones store enough charge in a capacitor to shine for five minutes at a red light.",
        "Wide tyres at low pressure roll more easily on rough ground than narrow hard ones, since they bend around stones and do not lift the rider over each of them.",
    ],
    "stars": [
        "A star like the sun shines for ten billion years by fusing hydrogen in its core. When the core is spent it contracts and heats, while the outer layers swell until they swallow the nearest planets.",
        "Astronomers measure near stars by parallax. In half a year the earth moves three hundred million kilometres, and a star that shifts by one second of arc for half that base lies a little over three light years away.",
        "Neutron stars weigh more than the sun and are no wider than a city. Some of them sweep a beam of radio waves past us hundreds of times a second and keep time better than most clocks.",
        "Dark lanes in the Milky Way are not gaps but dust. Infrared light passes through it, and telescopes tuned to heat have found young stars still wrapped in the clouds that made them.",
        "The colour of a star tells its temperature: red ones are coolest at three thousand degrees, blue ones hottest at thirty thousand. The eye sees few colours at night because its cones need more light than stars give.",
        "A nova is a small dead star that steals gas from its neighbour until the layer explodes. The star survives, and may do it again after some decades.",
        "Variable stars of a certain kind brighten and fade with a period that depends on their true brightness. Whoever times one in a far galaxy knows how far away it is.",
        "Light pollution grows by several percent a year. Shielded lamps that send nothing upwards would halve it at no cost to anyone but the makers of unshielded ones.",
        "Meteor showers come when the earth crosses the track of a comet. The grains are as small as sand and burn a hundred kilometres up, each in less than a second.",
        "Some old globular clusters hold a million stars that were born together. Near their centre the night sky would be as bright as a full moon, and no planet's orbit would last.",
    ],
    "tea": [
        "Green tea is heated soon after picking, so that its leaves stay green and its taste stays grassy. Brew it at seventy degrees; boiling water pulls out tannins and makes it bitter within a minute.",
        "Black tea is rolled to break the leaf, and the juice browns in the air like a cut apple. Firing stops it. Leaves from the second harvest in early summer give the fullest cup.",
        "Pu-erh is pressed into cakes and ages for decades in cool damp rooms. Microbes turn its edge into something earthy, and collectors pay more for a cake than for a bottle of old wine.",
        "Samovars kept water hot all day with a chimney of glowing charcoal through their middle. A strong brew stood in a small pot on top, and every guest thinned it to taste.",
        "Tea bushes left alone grow into trees of fifteen metres. Plantations keep them at the height of a waist, since only the top two leaves and the bud are worth picking.",
        "Milk binds the tannins that dry the mouth. Whether it goes in first or last changes the taste a little, because milk poured into hot tea is scalded drop by drop.",
        "The caffeine in a cup of tea is about half that of coffee, but an amino acid in the leaf slows its effect, so that it wakes more gently and lasts into the afternoon.",
        "White tea is merely withered and dried. Its buds keep their silver down, and the liquor is so pale that newcomers think it has been brewed too short.",
        "Clay pots from one old district are never washed with soap. Their pores take up the oils of the tea, and each pot is kept for a single kind.",
        "Auctions still set the price of most leaf. Tasters slurp hundreds of samples in a morning and write three words on each, and by noon a harvest is sold.",
    ],
    "maps": [
        "No flat map keeps both angles and areas. The sailor's projection keeps angles, so that a straight line is a steady course, and pays for it with an Arctic that looks larger than Africa.",
        "Contour lines join points of equal height. Where they crowd the ground is steep, and where a line bends towards higher numbers a stream has cut a valley.",
        "Surveyors once measured a country with chains and angles. From one base line of a few kilometres, carefully laid on level ground, a net of triangles could carry distances across mountains.",
        "Satellite receivers solve for four unknowns: three of place and one of time. The clock in the receiver is poor, and the fourth satellite corrects it to a few billionths of a second.",
        "Old charts marked unknown coasts with dotted lines and the word 'reported'. Some such islands stayed on paper for a century before a captain sailed straight through them.",
        "A map's scale tells how many units on the ground one unit on paper stands for. Roads are drawn far wider than scale allows, or no driver would see them.",
        "Publishers hide a street that does not exist in a city map. When a rival prints it too, the copying is proved in court.",
        "Digital maps are cut into square tiles, each level of zoom holding four times as many as the one before. A phone asks only for the dozen it shows.",
        "Magnetic north wanders by tens of kilometres a year. Charts print the difference from true north for one date, with the change to add for every year since.",
        "Tide tables belong to every sea chart, because the depths printed on it are those of the lowest water. At high tide a skipper may pass over a bank that grounds him six hours later.",
    ],
}

OTHER = {
    "de": ["Moore wachsen um einen Millimeter im Jahr. Torfmoos saugt Regen auf und säuert das Wasser, bis kaum etwas verrottet.", "Wird ein Moor entwässert, so sackt der Boden ab und gibt den gespeicherten Kohlenstoff frei. Erst wenn die Gräben verschlossen sind, kommt das Moos zurück."],
    "ja": ["電車が遅れたときは、駅の窓口で遅延証明書をもらえます。会社や学校に見せれば、遅刻の理由になります。", "雪の多い町では、道の真ん中から水が出て雪をとかします。地下水は冬でも冷たくないからです。"],
    "ru": ["Старые мосты через реку строили из дуба. В воде он не гниёт и со временем становится твёрдым, как камень.", "Весной лёд ломает слабые опоры, поэтому перед мостом ставят ледорезы из толстых брёвен."],
    "th": ["ข้าวเหนียวต้องแช่น้ำหนึ่งคืนก่อนนึ่ง เมล็ดจะนุ่มและเกาะกัน คนทางเหนือกินกับมือ", "ตลาดน้ำเปิดแต่เช้าตรู่ เรือเล็กขายก๋วยเตี๋ยวและผลไม้ตามคลอง"],
}

WRAPPED = """Letters to the harbour office should name the ship, the berth and the
date of arrival. The office answers within three days. A ship without
a berth waits in the roads until one is free, and pays for each night.

Fees are due before departure:

- a quarter of a crown for each metre of length
- one crown for water
- two crowns for the crane, by the hour

Complaints go to the harbour master in person. He keeps his door open
from eight to ten in the morning, except on Sundays."""

CODE = '''The counter below reads words from standard input and prints the ten commonest.

```python
import collections, sys

def words(lines):
    for line in lines:
        yield from line.lower().split()

counts = collections.Counter(words(sys.stdin))
for word, n in counts.most_common(10):
    print(f"{n:6} {word}")
```

Punctuation sticks to the words; strip it first if that matters. For files larger than memory the counter still works, since only distinct words are kept.

A second program merges the outputs of many runs. It adds up equal words and must therefore see all counts, not only the ten commonest of each run.'''


def document(name, topic, records):
    starts, at = [], 0
    for record in records:
        starts.append(at)
        at += len(record.encode()) + 1
    return dict(id=name, topic=topic, text=" ".join(records), record_byte_starts=starts)


docs = []
for topic, records in TOPICS.items():
    for i, (low, high) in enumerate([(0, 4), (4, 7), (7, 10)]):
        docs.append(document(f"{topic}-{i + 1}", topic, records[low:high]))
for lang, records in OTHER.items():
    docs.append(document(f"script-{lang}", lang, records))
docs.append(document("hard-wrapped", "harbour", [WRAPPED]))
docs.append(document("with-code", "code", [CODE]))

with open("records.jsonl", "w", encoding="utf-8") as out:
    for d in docs:
        out.write(json.dumps(d, ensure_ascii=False) + "\n")

import pyarrow as pa
import pyarrow.parquet as pq

schema = pa.schema([("id", pa.string()), ("topic", pa.string()), ("text", pa.string()), ("record_byte_starts", pa.list_(pa.int64()))])
pq.write_table(pa.Table.from_pylist(docs, schema=schema), "records.parquet", compression="zstd")
print(len(docs), "documents,", sum(len(d["record_byte_starts"]) for d in docs), "records")
