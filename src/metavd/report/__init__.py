"""What a person looks at: figures and pages. Reads runs' folders alone; trains nothing.

read      a run's folder -> `Run`, checked
groups    runs -> one `Group` for each method, with its name and its look in every figure
summary   figures with intervals, as table rows
pictures  the look of figures; figures as files and as a part of the page
intervals, curves, reliability, gains, personal
          one kind of figure each
page      all of it as one HTML file
clients   the picture of who holds what, of `metavd data show`
"""
